"""Steps filled up to one of a few sizes, where oneDNN compiles a product anew for each number of rows that it meets.

That takes a millisecond and leaves one to three megabytes, once for each shape of a matrix: without this a server whose
steps have all sizes grows by gigabytes. Filled up, a product has a quarter more rows at most, and a tenth on average.
Experts see as many rows as a router sends them, and are compiled for each number as before.
"""

from typing import Any

import numpy as np
import torch

from pagedkv.models.dtypes import has_bf16_product

_LARGEST_OCTAVE = 2048


def compiles_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN multiplies matrices of that type, compiled for each number of rows."""
    return device.type == "cpu" and dtype is torch.bfloat16 and has_bf16_product()


def padded_rows(count: int) -> int:
    """Return the next number of rows that products are compiled for: four to each doubling, then each 256th.

    Examples
    --------
    >>> [padded_rows(count) for count in (0, 1, 5, 8, 9, 33, 127, 2048, 2049)]
    [0, 1, 5, 8, 10, 40, 128, 2048, 2304]
    """
    step = 1 << max(0, min(count - 1, _LARGEST_OCTAVE - 1).bit_length() - 3)
    return -(-count // step) * step


def pad_step(plan: Any, rows: Any) -> tuple[Any, Any]:
    """Fill a step up.

    Parameters
    ----------
    plan : StepPlan
        The plan. One made by hand, without `pad_to`, stays as it is.
    rows : numpy.ndarray, shape (num_rows,), int32, or None
        Tokens of the plan behind which logits are wanted, if not those that samples are drawn from.

    Returns
    -------
    plan : StepPlan
        With more tokens, that belong to no sequence, and samples of the first token.
    rows : numpy.ndarray, int32, or None
        With more of the first token.
    """
    tokens, samples = padded_rows(len(plan.token_ids)), len(plan.sample_rows)
    if rows is None:
        samples = padded_rows(samples)
    else:
        rows = np.pad(rows, (0, padded_rows(len(rows)) - len(rows)))
    if (tokens, samples) != (len(plan.token_ids), len(plan.sample_rows)) and hasattr(plan, "pad_to"):
        plan = plan.pad_to(len(plan.seq_lens), tokens, samples)
    return plan, rows
