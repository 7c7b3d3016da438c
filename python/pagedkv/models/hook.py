"""The attention function that transformers calls, and what it refuses by name."""

from typing import Any

import torch
from transformers import AttentionInterface

from pagedkv.exceptions import UnsupportedError
from pagedkv.models.metadata import AttentionStep, current_step

NAME = "pagedkv"

# Keywords of a forward pass that reach attention layers and do not concern them.
_NOT_ATTENTION = frozenset(
    {
        "cache_position",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
    }
)


def register_attention() -> None:
    """Make "pagedkv" an attention implementation of transformers; doing so again changes nothing.

    A model that uses it takes packed input: ``input_ids`` and ``position_ids`` of shape ``(1, num_tokens)``, sequence
    after sequence, with ``use_cache=False`` and an `AttentionMetadata` as the keyword ``pagedkv``.

    Examples
    --------
    >>> register_attention()
    >>> from transformers import AttentionInterface
    >>> "pagedkv" in AttentionInterface.valid_keys(AttentionInterface())
    True
    """
    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    pagedkv: AttentionStep | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer; transformers' signature and shapes.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer; `layer_idx` says which.
    query : torch.Tensor, shape (1, num_q_heads, num_tokens, head_dim)
        Rotated queries.
    key, value : torch.Tensor, shape (1, num_kv_heads, num_tokens, head_dim)
        Keys and values of the new tokens only.
    attention_mask, dropout, is_causal
        Refused unless None, 0, and None or true.
    scaling, sliding_window, softcap, s_aux
        As in `paged_attention`: `softmax_scale`, `sliding_window`, `soft_cap`, `sinks`.
    pagedkv : AttentionMetadata
        The step.
    **others
        Refused by name where they change attention.

    Returns
    -------
    out : torch.Tensor, shape (1, num_tokens, num_q_heads, head_dim)
        The result.
    weights : None
        Attention weights are never made.

    Raises
    ------
    UnsupportedError
        If the layer asks for something that is not implemented.
    """
    if attention_mask is not None:
        raise _refusal(module, "attention_mask", "None, because the step knows its sequences", attention_mask)
    if dropout:
        raise _refusal(module, "dropout", "0: call model.eval()", dropout)
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise _refusal(module, "is_causal", "causal attention", False)
    _refuse_others(module, others)
    _check_tensors(module, query, key, value)
    step = pagedkv if pagedkv is not None else current_step()
    if step is None:
        raise _refusal(module, "pagedkv", "an AttentionMetadata, as a keyword of the model's forward", None)
    out = step.attend(
        _layer_idx(module),
        _by_token(query),
        _by_token(key),
        _by_token(value),
        softmax_scale=scaling,
        sliding_window=sliding_window,
        soft_cap=softcap,
        # A learned parameter keeps its gradient flag in inference mode.
        sinks=None if s_aux is None else s_aux.detach(),
    )
    return out[None], None


def _refusal(module: torch.nn.Module, argument: str, expected: str, found: Any) -> UnsupportedError:
    if isinstance(found, torch.Tensor):
        found = f"a tensor of shape {tuple(found.shape)}"
    return UnsupportedError(f"{argument}: expected {expected}, found {found} in {type(module).__name__}")


def _refuse_others(module: torch.nn.Module, others: dict[str, Any]) -> None:
    for name, found in others.items():
        if found is not None and found is not False and name not in _NOT_ATTENTION:
            raise _refusal(module, name, "none, because pagedkv does not implement it", found)


def _check_tensors(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    if query.shape[0] != 1:
        raise _refusal(module, "query", "a batch of 1 with all sequences packed", query)
    if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
        raise _refusal(module, "value", f"the head_dim of the queries, {query.shape[-1]}", value)
    if query.requires_grad:
        raise _refusal(module, "query", "no gradient: use torch.inference_mode()", "requires_grad=True")


def _layer_idx(module: torch.nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise _refusal(module, "layer_idx", "the number of the layer", layer)
    return layer


def _by_token(heads: torch.Tensor) -> torch.Tensor:
    """Turn (1, heads, tokens, head_dim) into (tokens, heads, head_dim), without a copy where head_dim is contiguous."""
    tokens = heads[0].transpose(0, 1)
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()
