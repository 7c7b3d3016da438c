"""What a model's attention layers ask for, found by one forward pass of one token."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pagedkv.config import GroupSpec
from pagedkv.exceptions import UnsupportedError
from pagedkv.models.metadata import AttentionStep
from pagedkv.models.support import check_layers


@dataclass
class _Probe:
    """Notes what each layer asks for and answers with zeros."""

    head_shapes: dict[int, tuple[int, int]] = field(default_factory=dict)
    sliding_windows: dict[int, int | None] = field(default_factory=dict)

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
    ) -> torch.Tensor:
        if layer in self.head_shapes:
            raise UnsupportedError(f"model: layer {layer} attends twice in one pass, which one cache layer can't hold")
        num_kv_heads, head_dim = k.shape[1:]
        self.head_shapes[layer] = (num_kv_heads, head_dim)
        self.sliding_windows[layer] = sliding_window
        return torch.zeros_like(q)


def probe_layers(model: Any, config: Any, run: Callable[[AttentionStep], object]) -> GroupSpec:
    """Return what a cache for the model must hold.

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
    GroupSpec
        Layers, KV heads, head dimension and element type.

    Raises
    ------
    UnsupportedError
        If the layers differ, or some of them do not attend through the AttentionInterface.
    """
    probe = _Probe()
    try:
        run(probe)
    except UnsupportedError:
        raise
    except Exception as error:
        why = f"does not run on packed tokens through transformers' AttentionInterface: {error}"
        raise UnsupportedError(f"model: {type(model).__name__} {why}") from error
    check_layers(model, config, probe.sliding_windows)
    shapes = set(probe.head_shapes.values())
    if len(shapes) > 1:
        raise UnsupportedError(
            f"model: {type(model).__name__} has layers of different (num_kv_heads, head_dim): {sorted(shapes)}"
        )
    num_kv_heads, head_dim = shapes.pop()
    dtype = str(model.dtype).removeprefix("torch.")
    return GroupSpec(len(probe.head_shapes), num_kv_heads, head_dim, dtype)
