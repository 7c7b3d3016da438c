"""Which models fit a paged cache, said before the first step and by name."""

import inspect
from collections.abc import Iterator
from typing import Any

from pagedkv.exceptions import UnsupportedError

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_model(model: Any, config: Any) -> None:
    """Refuse a model whose forward pass or configuration rules a paged cache out.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.
    config : transformers.PreTrainedConfig
        The configuration of its text decoder.

    Raises
    ------
    UnsupportedError
        If it is no causal decoder with keys and values in every layer, or is in training mode.
    """
    if model.training:
        raise _refusal(model, "is in training mode: call model.eval()")
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refusal(model, "has an encoder (config.is_encoder_decoder)")
    if not hasattr(model, "lm_head") and model.get_output_embeddings() is None:
        raise _refusal(model, "has no head that gives logits: load it by AutoModelForCausalLM")
    if getattr(config, "use_bidirectional_attention", None):
        raise _refusal(model, "lets tokens see later ones (config.use_bidirectional_attention)")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if others:
        raise _refusal(model, f"has layers that are not full or sliding attention (config.layer_types: {others})")
    if getattr(model, "_is_stateful", False):
        raise _refusal(model, "keeps a recurrent state beside keys and values")
    _check_forward(model)


def _check_forward(model: Any) -> None:
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        raise _refusal(model, "takes no position_ids, which packed sequences need")
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        raise _refusal(model, "takes no further keywords, so its layers can't be told about the step")


def check_layers(model: Any, config: Any, sliding_windows: dict[int, int | None]) -> None:
    """Refuse a model of which some layers did not call the attention function as their configuration says.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.
    config : transformers.PreTrainedConfig
        The configuration of its text decoder.
    sliding_windows : dict of int to int or None
        The window that each layer passed to the attention function, by index.

    Raises
    ------
    UnsupportedError
        If a layer is missing, or has a window and did not pass it.
    """
    if not sliding_windows:
        raise _refusal(model, "does not use transformers' AttentionInterface")
    missing = sorted(set(range(config.num_hidden_layers)) ^ set(sliding_windows))
    if missing:
        raise _refusal(model, f"has layers without attention through the AttentionInterface: {missing}")
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind == "sliding_attention" and sliding_windows.get(layer) is None:
            raise _refusal(model, f"hides the window of layer {layer} in its mask (sliding_window: None)")


def longest_model_len(config: Any) -> int | None:
    """Return up to which length the positions of a sequence do not depend on what else is in the batch.

    Dynamic and long RoPE change the frequencies of the whole batch when one sequence passes a length.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The configuration of a text decoder.

    Returns
    -------
    int or None
        `max_position_embeddings`, or the length that long RoPE was scaled from; None where the configuration has none.
    """
    lengths = [getattr(config, "max_position_embeddings", None)]
    for rope in _rope_parameters(config):
        if rope.get("rope_type", rope.get("type")) == "longrope":
            fallback = getattr(config, "original_max_position_embeddings", None)
            lengths.append(rope.get("original_max_position_embeddings", fallback))
    return min((length for length in lengths if length is not None), default=None)


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer_type = [rope for rope in parameters.values() if isinstance(rope, dict)]
    yield from by_layer_type or [parameters]


def _refusal(model: Any, why: str) -> UnsupportedError:
    return UnsupportedError(f"model: {type(model).__name__} {why}")
