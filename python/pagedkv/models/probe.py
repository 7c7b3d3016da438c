"""What a model's attention layers ask for, found by one forward pass of one token."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pagedkv.exceptions import UnsupportedError
from pagedkv.models.metadata import AttentionStep
from pagedkv.models.support import check_layers
from pagedkv.planning.layers import LayerShape


@dataclass
class _Probe:
    """Notes what each layer asks for and answers with zeros."""

    layers: dict[int, LayerShape] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float | None,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if layer in self.layers:
            raise UnsupportedError(f"model: layer {layer} attends twice in one pass, which one cache layer can't hold")
        num_kv_heads, head_dim = k.shape[1:]
        self.layers[layer] = LayerShape(num_kv_heads, head_dim, sliding_window)
        return torch.zeros_like(q)


def probe_layers(model: Any, config: Any, run: Callable[[AttentionStep], object]) -> dict[int, LayerShape]:
    """Return what each layer of a model asks of the cache.

    The answer comes from the model, not from the names that its configuration happens to use.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.
    config : transformers.PreTrainedConfig
        The configuration of its text decoder.
    run : callable
        Runs the model on one token, with the given step as its attention.

    Returns
    -------
    dict of int to LayerShape
        KV heads, head dimension and window by layer.

    Raises
    ------
    UnsupportedError
        If some layers do not attend through the AttentionInterface, or hide their window.
    """
    probe = _Probe()
    try:
        run(probe)
    except UnsupportedError:
        raise
    except Exception as error:
        why = f"does not run on packed tokens through transformers' AttentionInterface: {error}"
        raise UnsupportedError(f"model: {type(model).__name__} {why}") from error
    check_layers(model, config, {layer: shape.sliding_window for layer, shape in probe.layers.items()})
    return probe.layers
