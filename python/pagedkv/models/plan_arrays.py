"""The arrays of a plan that a forward pass reads, where the model is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from pagedkv.kv_cache.device import uploaded

_NAMES = ("token_ids", "positions", "sample_rows", "slot_mapping", "input_from")


@dataclass(frozen=True, slots=True)
class PlanArrays:
    """Arrays of a plan by their names in it: views of the plan's own memory, or of a copy on a device.

    Attributes
    ----------
    token_ids, positions : torch.Tensor, shape (num_tokens,), int32
        The tokens of the step.
    sample_rows : torch.Tensor, shape (num_samples,), int32
        The tokens that samples are drawn from.
    slot_mapping : torch.Tensor, shape (num_groups, num_tokens), int64
        Where their keys and values go.
    input_from : torch.Tensor, shape (num_tokens,), int32, or None
        Which tokens the plan before is drawing.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sample_rows: torch.Tensor
    slot_mapping: torch.Tensor
    input_from: torch.Tensor | None = None

    @classmethod
    def of(cls, plan: Any, device: torch.device) -> PlanArrays:
        """Return the arrays of a plan on a device, to which they go in one copy.

        Parameters
        ----------
        plan : StepPlan
            The plan, which keeps its memory until it is done.
        device : torch.device
            Where they are wanted; nothing is copied for the CPU.

        Returns
        -------
        PlanArrays
            The arrays.
        """
        if device.type == "cpu":
            # A plan made by hand has no drawn tokens to run, and need not say so.
            names = [name for name in _NAMES if name != "input_from" or hasattr(plan, name)]
            return cls(**{name: from_dlpack(getattr(plan, name)) for name in names})
        return cls.within(plan, uploaded(from_dlpack(plan.buffer), device))

    @classmethod
    def within(cls, plan: Any, arena: torch.Tensor) -> PlanArrays:
        """Return the arrays of a plan within a copy of its buffer.

        Parameters
        ----------
        plan : StepPlan
            The plan.
        arena : torch.Tensor, shape (num_bytes,), uint8
            Its buffer, or so much of it that all these arrays are there.

        Returns
        -------
        PlanArrays
            Views of the copy.
        """
        start = plan.buffer.ctypes.data
        views = []
        for name in _NAMES:
            array = getattr(plan, name)
            offset = array.ctypes.data - start if array.size else 0
            part = arena[offset : offset + array.nbytes]
            views.append(part.view(getattr(torch, str(array.dtype))).view(array.shape))
        return cls(*views)


def input_tokens(arrays: PlanArrays, previous_tokens: torch.Tensor | None) -> torch.Tensor:
    """Return the tokens to run, those that the plan before is still drawing among them.

    Parameters
    ----------
    arrays : PlanArrays
        The arrays of the plan.
    previous_tokens : torch.Tensor, shape (num_samples of the plan before,), int32, or None
        What was drawn for that one, where this refers to it.
    """
    if previous_tokens is None or not len(previous_tokens) or arrays.input_from is None:
        return arrays.token_ids
    source = arrays.input_from.long()
    return torch.where(source < 0, arrays.token_ids, previous_tokens[source.clamp(min=0)])
