"""Launches `gather_kv`: collects the keys and values of whole sequences."""

from typing import TYPE_CHECKING

from pagedkv.exceptions import InvalidArgumentError
from pagedkv.kernels.checked import Argument, Parameters
from pagedkv.kernels.dims import CACHED, COMPUTED, LAYER, TABLE, Dims, check_distinct, dtype_name, strides
from pagedkv.kernels.launch import Arrays, launcher_of, run
from pagedkv.kernels.rows import cache_values, check_same_type, check_sizes, row_variant, type_code

if TYPE_CHECKING:
    import torch

_WRITTEN = frozenset({"k_out", "v_out"})
_ROWS = ("sum(seq_lens)", "num_kv_heads", "head_dim")


def gather_kv(
    k_cache: "torch.Tensor",
    v_cache: "torch.Tensor",
    block_table: "torch.Tensor",
    token_starts: "torch.Tensor",
    rows: "torch.Tensor | None",
    k_out: "torch.Tensor",
    v_out: "torch.Tensor",
    *,
    num_tokens: int,
    k_scale: "torch.Tensor | None" = None,
    v_scale: "torch.Tensor | None" = None,
) -> None:
    """Collect keys and values; as `pagedkv.kv_cache.gather_kv`, all arrays on one device.

    Parameters
    ----------
    k_cache, v_cache, block_table, rows, k_scale, v_scale
        As there. Block ids are not looked at.
    token_starts : torch.Tensor, shape (num_seqs + 1,), int32
        Where each sequence's tokens start in the outputs; the last entry is `num_tokens`.
    k_out, v_out : torch.Tensor, shape (num_tokens, num_kv_heads, head_dim)
        Where to write.
    num_tokens : int
        Tokens of all sequences.
    """
    dims = Dims(k_cache.device)
    dims.check("k_cache", k_cache, LAYER, CACHED)
    dims.check("v_cache", v_cache, LAYER, CACHED)
    dims.check("block_table", block_table, TABLE, ("int32",))
    dims.fix("sum(seq_lens)", num_tokens)
    for name, out, cache in (("k_out", k_out, k_cache), ("v_out", v_out, v_cache)):
        dims.check(name, out, _ROWS, (*COMPUTED, *({dtype_name(cache)} - set(COMPUTED))))
        check_distinct(name, out)
    check_same_type("k_cache", k_cache, "v_cache", v_cache)
    check_same_type("k_out", k_out, "v_out", v_out)
    check_sizes(k_cache)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and dtype_name(k_out) not in COMPUTED:
            expected = "none beside an output of FP8, which is a copy"
            raise InvalidArgumentError(f"{name}: expected {expected}, found an output of {dtype_name(k_out)}")
    inputs: Arrays = {"k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
    inputs = {**inputs, "k_scale": k_scale, "v_scale": v_scale}
    k_strides, v_strides = strides(k_out), strides(v_out)
    values = cache_values(k_cache, v_cache, k_scale, v_scale) | {
        "num_tokens": num_tokens,
        "num_seqs": len(token_starts) - 1,
        "out_type": type_code(k_out),
        "cache_type": type_code(k_cache),
        "unused": 0,
        "k_token_stride": k_strides[0],
        "k_head_stride": k_strides[1],
        "v_token_stride": v_strides[0],
        "v_head_stride": v_strides[1],
        "table_row_stride": strides(block_table)[0],
    }
    variant = row_variant("gather_kv", k_out, v_out, k_cache, v_cache)
    written = [Argument.of(name, name, out) for name, out in (("k_out", k_out), ("v_out", v_out))]
    read = [Argument.of(name, name, array) for name, array in inputs.items() if array is not None]
    params = Parameters("gather_kv", values, written, read)
    arrays = {**inputs, "k_out": k_out, "v_out": v_out, "token_starts": token_starts, "rows": rows}
    run(launcher_of(k_cache.device), variant, params, arrays, _WRITTEN, num_tokens)
