"""Launches `paged_decode`, `paged_prefill` and `merge_partials`: attention of a planned batch over one layer."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.kernels import variants
from pagedkv.kernels.dims import (
    CACHED,
    COMPUTED,
    LAYER,
    TABLE,
    TYPE_CODES,
    Dims,
    alignment,
    check_written,
    dtype_name,
    strides,
)
from pagedkv.kernels.launch import Launcher, launcher_of, run
from pagedkv.kernels.rows import check_same_type, check_sizes, layout, scale_stride
from pagedkv.kernels.variants import HEAD_DIM_CLASSES, Variant

if TYPE_CHECKING:
    import torch

_QUERIES = ("num_tokens", "num_q_heads", "head_dim")
_WRITTEN = frozenset({"out", "lse", "partial_out", "partial_lse"})
_MERGED = frozenset({"out", "lse"})
# A window is subtracted from positions in 32 bits; no sequence is so long that a longer one says anything else.
_LONGEST_WINDOW = 2**30 - 1

_decode = functools.cache(variants.paged_decode)
_prefill = functools.cache(variants.paged_prefill)
_merge = functools.cache(variants.merge_partials)


@dataclass(frozen=True)
class WorkLists:
    """A planned batch in device memory.

    Attributes
    ----------
    few, many, merges : torch.Tensor, int32
        Lists of work items for `paged_decode` and `paged_prefill`, and of merge items: a header, whose first word is
        the number of items, and the items.
    num_few, num_many, num_merges : int
        For how many items thread blocks are launched: as many as there are, or as there may come to be.
    tree_mask, tree_depths : torch.Tensor or None
        Rows of draft trees as 32-bit words, and how many tokens of the tree each query sees, less one.
    num_partial_rows : int
        Rows of the workspace that partial results take.
    """

    few: "torch.Tensor"
    many: "torch.Tensor"
    merges: "torch.Tensor"
    num_few: int
    num_many: int
    num_merges: int
    tree_mask: "torch.Tensor | None"
    tree_depths: "torch.Tensor | None"
    num_partial_rows: int


@dataclass(frozen=True)
class LayerOptions:
    """What changes numbers from layer to layer; as for `pagedkv.paged_attention`."""

    softmax_scale: float | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: "torch.Tensor | None" = None
    sinks: "torch.Tensor | None" = None
    k_scale: "torch.Tensor | None" = None
    v_scale: "torch.Tensor | None" = None


def rows_per_item(head_dim: int) -> tuple[int, int]:
    """Return the query rows of a work item of `paged_decode` and of one of `paged_prefill`."""
    few, many = (variant("float16", "float16", head_dim, features=False) for variant in (_decode, _prefill))
    return few.rows, many.rows


def attend(
    work: WorkLists,
    q: "torch.Tensor",
    k_cache: "torch.Tensor",
    v_cache: "torch.Tensor",
    block_table: "torch.Tensor",
    out: "torch.Tensor",
    lse: "torch.Tensor | None",
    options: LayerOptions,
) -> None:
    """Compute the attention of one layer into `out` and, if there is one, `lse`.

    Parameters
    ----------
    work : WorkLists
        The batch, planned for the sizes of these arrays.
    q, k_cache, v_cache, block_table, out, lse, options
        As for `pagedkv.paged_attention`, all arrays on one device. Block ids are not looked at.

    Raises
    ------
    TypeError, InvalidArgumentError
        If shapes disagree, or an element type is none that attention has on a GPU.
    UnsupportedError
        If rows lie where the kernels can't read them, or heads are too long.
    """
    dims = _check(q, k_cache, v_cache, block_table, out, lse, options)
    if q.numel() == 0:
        return
    num_kv_heads, head_dim = dims["num_kv_heads"], dims["head_dim"]
    arrays: dict[str, torch.Tensor | None] = {
        "out": out,
        "lse": lse,
        "partial_out": None,
        "partial_lse": None,
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": block_table,
        "work": None,
        "merges": work.merges,
        "k_scale": options.k_scale,
        "v_scale": options.v_scale,
        "alibi_slopes": options.alibi_slopes,
        "sinks": options.sinks,
        "tree_mask": work.tree_mask,
        "tree_depths": work.tree_depths,
    }
    if work.num_partial_rows:
        shape = (work.num_partial_rows, num_kv_heads)
        arrays["partial_out"] = q.new_empty((*shape, head_dim), dtype=_float32())
        arrays["partial_lse"] = q.new_empty(shape, dtype=_float32())
    values = _values(dims, arrays, options)
    has_features = work.tree_mask is not None or any(
        feature is not None
        for feature in (options.sliding_window, options.soft_cap, options.alibi_slopes, options.sinks)
    )
    of_types = (dtype_name(q), dtype_name(k_cache), head_dim)
    launcher = launcher_of(q.device)
    for variant, items, count in (
        (_decode(*of_types, features=has_features), work.few, work.num_few),
        (_prefill(*of_types, features=has_features), work.many, work.num_many),
    ):
        run(launcher, variant, arrays | {"work": items}, values, _WRITTEN, count * num_kv_heads)
    run(launcher, _merge(dtype_name(q)), arrays, values, _MERGED, work.num_merges * num_kv_heads)


def _values(dims: Dims, arrays: Mapping[str, Any], options: LayerOptions) -> dict[str, Any]:
    """Return the parameters that are no pointers."""
    q, out, lse, k_cache, v_cache = (arrays[name] for name in ("q", "out", "lse", "k_cache", "v_cache"))
    (q_token, q_head, _), (out_token, out_head, _) = strides(q), strides(out)
    head_dim, window = dims["head_dim"], options.sliding_window
    scale = options.softmax_scale
    return {
        "k_layout": layout(k_cache),
        "v_layout": layout(v_cache),
        "q_token_stride": q_token,
        "q_head_stride": q_head,
        "out_token_stride": out_token,
        "out_head_stride": out_head,
        "lse_token_stride": 0 if lse is None else strides(lse)[0],
        "table_row_stride": strides(arrays["block_table"])[0],
        "num_kv_heads": dims["num_kv_heads"],
        "group": dims["num_q_heads"] // dims["num_kv_heads"],
        "head_dim": head_dim,
        "block_size": dims["block_size"],
        "k_scale_stride": scale_stride("k_scale", options.k_scale, k_cache),
        "v_scale_stride": scale_stride("v_scale", options.v_scale, v_cache),
        "slopes_type": _type_of(options.alibi_slopes),
        "sinks_type": _type_of(options.sinks),
        "sliding_window": 0 if window is None else min(window, _LONGEST_WINDOW),
        "copy_bytes": alignment(k_cache, v_cache),
        "softmax_scale": 1 / math.sqrt(head_dim) if scale is None else scale,
        "soft_cap": 0.0 if options.soft_cap is None else options.soft_cap,
    }


def _type_of(vector: "torch.Tensor | None") -> int:
    return 0 if vector is None else TYPE_CODES[dtype_name(vector)]


def _check(
    q: "torch.Tensor",
    k_cache: "torch.Tensor",
    v_cache: "torch.Tensor",
    block_table: "torch.Tensor",
    out: "torch.Tensor",
    lse: "torch.Tensor | None",
    options: LayerOptions,
) -> Dims:
    dims = Dims(q.device)
    dims.check("q", q, _QUERIES, COMPUTED)
    dims.check("k_cache", k_cache, LAYER, CACHED)
    dims.check("v_cache", v_cache, LAYER, CACHED)
    dims.check("block_table", block_table, TABLE, ("int32",))
    dims.check("out", out, _QUERIES, COMPUTED)
    inputs: dict[str, torch.Tensor | None] = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": block_table,
    }
    inputs |= {"k_scale": options.k_scale, "v_scale": options.v_scale}
    for name in ("alibi_slopes", "sinks"):
        vector = getattr(options, name)
        if vector is not None:
            dims.check(name, vector, ("num_q_heads",), COMPUTED)
            inputs[name] = vector
    check_written("out", out, inputs)
    if lse is not None:
        dims.check("lse", lse, _QUERIES[:2], ("float32",))
        check_written("lse", lse, inputs | {"out": out})
    check_sizes(k_cache)
    check_heads(dims["num_q_heads"], dims["num_kv_heads"], dims["head_dim"])
    _check_options(options)
    _check_types(q, k_cache, v_cache, out)
    _check_places(q, k_cache, v_cache, out)
    return dims


def check_heads(num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Refuse heads that the kernels of attention do not have, and numbers of heads that make no groups."""
    longest = HEAD_DIM_CLASSES[-1]
    if head_dim < 1 or head_dim % 8:
        raise InvalidArgumentError(f"head_dim: expected a multiple of 8 up to {longest} on a GPU, found {head_dim}")
    if head_dim > longest:
        raise UnsupportedError(f"head_dim: expected at most {longest} on a GPU, found {head_dim}")
    if num_q_heads == 0 or num_q_heads % num_kv_heads:
        raise InvalidArgumentError(
            f"num_q_heads: expected a multiple of num_kv_heads={num_kv_heads}, found {num_q_heads}"
        )


def _check_options(options: LayerOptions) -> None:
    scale, cap, window = options.softmax_scale, options.soft_cap, options.sliding_window
    if scale is not None and not math.isfinite(scale):
        raise InvalidArgumentError(f"softmax_scale: expected a finite number, found {scale}")
    if cap is not None and not (math.isfinite(cap) and cap > 0):
        raise InvalidArgumentError(f"soft_cap: expected a finite number above 0, found {cap}")
    if window is not None and window < 1:
        raise InvalidArgumentError(f"sliding_window: expected at least 1 (a token sees itself), found {window}")


def _check_types(q: "torch.Tensor", k_cache: "torch.Tensor", v_cache: "torch.Tensor", out: "torch.Tensor") -> None:
    check_same_type("k_cache", k_cache, "v_cache", v_cache)
    q_dtype, kv_dtype = dtype_name(q), dtype_name(k_cache)
    if out.dtype != q.dtype:
        raise TypeError(f"out: expected the dtype of q, {q_dtype}, on a GPU, found {dtype_name(out)}")
    variants.check_pair(q_dtype, kv_dtype)


def _check_places(q: "torch.Tensor", k_cache: "torch.Tensor", v_cache: "torch.Tensor", out: "torch.Tensor") -> None:
    for name, array, least in (("q", q, 16), ("out", out, 16), ("k_cache", k_cache, 8), ("v_cache", v_cache, 8)):
        if array.numel() and alignment(array) < least:
            found = f"address {array.data_ptr():#x} and strides {array.stride()} of {array.element_size()} bytes"
            raise UnsupportedError(f"{name}: expected rows at multiples of {least} bytes on a GPU, found {found}")


def _float32() -> "torch.dtype":
    import torch

    return torch.float32


def variants_of_batch(q_dtype: str, kv_dtype: str, head_dim: int, *, features: bool) -> list[Variant]:
    """Return what attention of these types launches, for loading it before a graph is captured."""
    of_types = (q_dtype, kv_dtype, head_dim)
    return [_decode(*of_types, features=features), _prefill(*of_types, features=features), _merge(q_dtype)]


def blocks_side_by_side(launcher: Launcher, head_dim: int) -> int:
    """Return how many thread blocks of `paged_decode` a device runs at the same time."""
    from pagedkv.kernels.occupancy import blocks_per_multiprocessor

    variant = _decode("float16", "float16", head_dim, features=False)
    return max(1, blocks_per_multiprocessor(variant, launcher.arch)) * launcher.num_multiprocessors
