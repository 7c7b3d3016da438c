"""Launches `paged_decode`, `paged_prefill` and `merge_partials`: attention of a planned batch over one layer."""

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.kernels import variants
from pagedkv.kernels.checked import Argument, Kept, Parameters
from pagedkv.kernels.dims import (
    CACHED,
    COMPUTED,
    LAYER,
    TABLE,
    TYPE_CODES,
    Dims,
    alignment,
    check_distinct,
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
    batch = (q, k_cache, v_cache, block_table, out, lse)
    tensors = (options.alibi_slopes, options.sinks, options.k_scale, options.v_scale)
    numbers = (options.softmax_scale, options.sliding_window, options.soft_cap)
    layer = _kept((*batch, *tensors), *numbers, work.tree_mask is not None)
    if q.numel() == 0:
        return
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
        arrays |= _workspace(work.num_partial_rows, k_cache)
    launcher, num_kv_heads = launcher_of(q.device), k_cache.shape[1]
    for variant, items, count in ((layer.decode, work.few, work.num_few), (layer.prefill, work.many, work.num_many)):
        run(launcher, variant, layer.params, arrays | {"work": items}, _WRITTEN, count * num_kv_heads)
    run(launcher, layer.merge, layer.params, arrays, _MERGED, work.num_merges * num_kv_heads)


@dataclass(frozen=True)
class _Layer:
    """The launches of layers that are alike."""

    decode: Variant
    prefill: Variant
    merge: Variant
    params: Parameters


def _workspace(num_rows: int, k_cache: "torch.Tensor") -> dict[str, "torch.Tensor"]:
    """Return memory for partial results, of this run alone: others may run on other streams."""
    import torch

    _, num_kv_heads, _, head_dim = k_cache.shape
    rows = torch.empty((num_rows, num_kv_heads, head_dim), dtype=torch.float32, device=k_cache.device)
    sums = torch.empty((num_rows, num_kv_heads), dtype=torch.float32, device=k_cache.device)
    return {"partial_out": rows, "partial_lse": sums}


def _check(
    q: "torch.Tensor",
    k_cache: "torch.Tensor",
    v_cache: "torch.Tensor",
    block_table: "torch.Tensor",
    out: "torch.Tensor",
    lse: "torch.Tensor | None",
    alibi_slopes: "torch.Tensor | None",
    sinks: "torch.Tensor | None",
    k_scale: "torch.Tensor | None",
    v_scale: "torch.Tensor | None",
    softmax_scale: float | None,
    sliding_window: int | None,
    soft_cap: float | None,
    has_trees: bool,
) -> _Layer:
    """Check a layer's arrays and options, and choose its kernels."""
    dims = Dims(q.device)
    dims.check("q", q, _QUERIES, COMPUTED)
    dims.check("k_cache", k_cache, LAYER, CACHED)
    dims.check("v_cache", v_cache, LAYER, CACHED)
    dims.check("block_table", block_table, TABLE, ("int32",))
    dims.check("out", out, _QUERIES, COMPUTED)
    check_distinct("out", out)
    written, read = {"out": out}, {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
    if lse is not None:
        dims.check("lse", lse, _QUERIES[:2], ("float32",))
        check_distinct("lse", lse)
        written["lse"] = lse
    for name, vector in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if vector is not None:
            dims.check(name, vector, ("num_q_heads",), COMPUTED)
            read[name] = vector
    read |= {name: scale for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)) if scale is not None}
    check_sizes(k_cache)
    check_heads(dims["num_q_heads"], dims["num_kv_heads"], dims["head_dim"])
    _check_options(softmax_scale, sliding_window, soft_cap)
    _check_types(q, k_cache, v_cache, out)
    _check_places(q, k_cache, v_cache, out)
    values = _values(dims, q, k_cache, v_cache, block_table, out, lse) | {
        "k_scale_stride": scale_stride("k_scale", k_scale, k_cache),
        "v_scale_stride": scale_stride("v_scale", v_scale, v_cache),
        "slopes_type": _type_of(alibi_slopes),
        "sinks_type": _type_of(sinks),
        "sliding_window": 0 if sliding_window is None else min(sliding_window, _LONGEST_WINDOW),
        "softmax_scale": 1 / math.sqrt(dims["head_dim"]) if softmax_scale is None else softmax_scale,
        "soft_cap": 0.0 if soft_cap is None else soft_cap,
    }
    outputs, inputs = ([Argument.of(name, name, array) for name, array in of.items()] for of in (written, read))
    features = has_trees or any(x is not None for x in (sliding_window, soft_cap, alibi_slopes, sinks))
    of_types = (dtype_name(q), dtype_name(k_cache), dims["head_dim"])
    return _Layer(
        _decode(*of_types, features=features),
        _prefill(*of_types, features=features),
        _merge(dtype_name(q)),
        Parameters("paged_decode", values, outputs, inputs),
    )


_kept = Kept(_check)


def _values(
    dims: Dims,
    q: "torch.Tensor",
    k_cache: "torch.Tensor",
    v_cache: "torch.Tensor",
    block_table: "torch.Tensor",
    out: "torch.Tensor",
    lse: "torch.Tensor | None",
) -> dict[str, Any]:
    """Return the parameters that say where rows lie."""
    (q_token, q_head, _), (out_token, out_head, _) = strides(q), strides(out)
    return {
        "k_layout": layout(k_cache),
        "v_layout": layout(v_cache),
        "q_token_stride": q_token,
        "q_head_stride": q_head,
        "out_token_stride": out_token,
        "out_head_stride": out_head,
        "lse_token_stride": 0 if lse is None else strides(lse)[0],
        "table_row_stride": strides(block_table)[0],
        "num_kv_heads": dims["num_kv_heads"],
        "group": dims["num_q_heads"] // dims["num_kv_heads"],
        "head_dim": dims["head_dim"],
        "block_size": dims["block_size"],
        "copy_bytes": alignment(k_cache, v_cache),
    }


def _type_of(vector: "torch.Tensor | None") -> int:
    return 0 if vector is None else TYPE_CODES[dtype_name(vector)]


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


def _check_options(scale: float | None, window: int | None, cap: float | None) -> None:
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


def blocks_side_by_side(launcher: Launcher, head_dim: int) -> int:
    """Return how many thread blocks of `paged_decode` a device runs at the same time."""
    from pagedkv.kernels.occupancy import blocks_per_multiprocessor

    variant = _decode("float16", "float16", head_dim, features=False)
    return max(1, blocks_per_multiprocessor(variant, launcher.arch)) * launcher.num_multiprocessors
