"""Launches `merge_states`: joins two attentions of the same queries over different keys."""

import functools
from typing import TYPE_CHECKING

from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.kernels import variants
from pagedkv.kernels.checked import Argument, Parameters
from pagedkv.kernels.dims import COMPUTED, Dims, alignment, check_distinct, strides
from pagedkv.kernels.launch import launcher_of, run
from pagedkv.kernels.rows import type_code

if TYPE_CHECKING:
    import torch

_WRITTEN = frozenset({"out", "lse"})
_OUT, _LSE = ("num_tokens", "num_q_heads", "head_dim"), ("num_tokens", "num_q_heads")
_SHARE = 8  # elements of a thread, as in the kernel
_variant = functools.cache(variants.merge_states)


def merge_states(
    out_a: "torch.Tensor",
    lse_a: "torch.Tensor",
    out_b: "torch.Tensor",
    lse_b: "torch.Tensor",
    out: "torch.Tensor",
    lse: "torch.Tensor",
) -> None:
    """Join two results into `out` and `lse`; as `pagedkv.attention.merge_states`, all arrays on one device.

    Raises
    ------
    UnsupportedError
        If the results differ in element type, `head_dim` is no multiple of 8, or rows are not at multiples of 16 bytes.
    """
    dims = Dims(out_a.device)
    for name, array in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        dims.check(name, array, _OUT, COMPUTED)
        if array.dtype != out_a.dtype:
            raise UnsupportedError(f"{name}: expected the dtype of out_a, {out_a.dtype}, on a GPU, found {array.dtype}")
    for name, array in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        dims.check(name, array, _LSE, ("float32",))
    if dims["head_dim"] % _SHARE:
        raise InvalidArgumentError(f"head_dim: expected a multiple of {_SHARE} on a GPU, found {dims['head_dim']}")
    for name, array in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        if array.numel() and alignment(array) < 16:
            raise UnsupportedError(f"{name}: expected rows at multiples of 16 bytes on a GPU, found others")
    check_distinct("out", out)
    check_distinct("lse", lse)
    arrays = {"out": out, "lse": lse, "out_a": out_a, "out_b": out_b, "lse_a": lse_a, "lse_b": lse_b}
    num_tokens, num_q_heads, head_dim = out.shape
    values = {"num_tokens": num_tokens, "num_q_heads": num_q_heads, "head_dim": head_dim, "type": type_code(out)}
    for prefix, array in (("out", out), ("a", out_a), ("b", out_b)):
        token, head, _ = strides(array)
        values |= {f"{prefix}_token_stride": token, f"{prefix}_head_stride": head}
    for prefix, array in (("lse", lse), ("lse_a", lse_a), ("lse_b", lse_b)):
        values[f"{prefix}_token_stride"] = strides(array)[0]
    variant = _variant()
    token_blocks = -(-num_q_heads * head_dim // _SHARE // variant.threads)
    written, read = [
        [Argument.of(name, name, array) for name, array in arrays.items() if (name in _WRITTEN) == is_written]
        for is_written in (True, False)
    ]
    params = Parameters("merge_states", values, written, read)
    run(launcher_of(out.device), variant, params, arrays, _WRITTEN, num_tokens * token_blocks)
