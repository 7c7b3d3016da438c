"""Launches `append_kv`: writes keys and values of new tokens into their slots."""

from typing import TYPE_CHECKING

from pagedkv.exceptions import InvalidArgumentError
from pagedkv.kernels.checked import Argument, Kept, Parameters
from pagedkv.kernels.dims import CACHED, COMPUTED, LAYER, Dims, check_distinct, dtype_name, strides
from pagedkv.kernels.launch import Arrays, launcher_of, run
from pagedkv.kernels.rows import cache_values, check_same_type, check_sizes, row_variant, type_code
from pagedkv.kernels.variants import Variant

if TYPE_CHECKING:
    import torch

_WRITTEN = frozenset({"k_cache", "v_cache"})
_ROWS = ("num_tokens", "num_kv_heads", "head_dim")


def append_kv(
    k: "torch.Tensor",
    v: "torch.Tensor",
    k_cache: "torch.Tensor",
    v_cache: "torch.Tensor",
    slot_mapping: "torch.Tensor",
    *,
    k_scale: "torch.Tensor | None" = None,
    v_scale: "torch.Tensor | None" = None,
) -> None:
    """Write keys and values into their slots; as `pagedkv.kv_cache.append_kv`, all arrays on one device.

    Notes
    -----
    What `slot_mapping` holds is not looked at: a negative slot is skipped, one outside the cache writes anywhere, and
    of tokens that share a slot any one wins.
    """
    arrays: Arrays = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "key": k,
        "value": v,
        "slot_mapping": slot_mapping,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    variant, params = _kept((k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale))
    run(launcher_of(k_cache.device), variant, params, arrays, _WRITTEN, len(slot_mapping))


def _check(
    k: "torch.Tensor",
    v: "torch.Tensor",
    k_cache: "torch.Tensor",
    v_cache: "torch.Tensor",
    slot_mapping: "torch.Tensor",
    k_scale: "torch.Tensor | None",
    v_scale: "torch.Tensor | None",
) -> tuple[Variant, Parameters]:
    dims = Dims(k_cache.device)
    dims.check("k", k, _ROWS, _stored_or_computed(k_cache))
    dims.check("v", v, _ROWS, _stored_or_computed(v_cache))
    dims.check("k_cache", k_cache, LAYER, CACHED)
    dims.check("v_cache", v_cache, LAYER, CACHED)
    dims.check("slot_mapping", slot_mapping, ("num_tokens",), ("int64",))
    check_same_type("k", k, "v", v)
    check_same_type("k_cache", k_cache, "v_cache", v_cache)
    check_sizes(k_cache)
    check_distinct("k_cache", k_cache)
    check_distinct("v_cache", v_cache)
    values = cache_values(k_cache, v_cache, k_scale, v_scale)
    if k.dtype == k_cache.dtype and (k_scale is not None or v_scale is not None):
        found = f"keys of {dtype_name(k)}"
        raise InvalidArgumentError(f"k_scale, v_scale: expected none beside what is stored as it is, found {found}")
    key_strides, value_strides = strides(k), strides(v)
    values |= {
        "num_tokens": dims["num_tokens"],
        "cache_type": type_code(k_cache),
        "input_type": type_code(k),
        "key_token_stride": key_strides[0],
        "key_head_stride": key_strides[1],
        "value_token_stride": value_strides[0],
        "value_head_stride": value_strides[1],
    }
    written = [Argument.of(name, name, cache) for name, cache in (("k_cache", k_cache), ("v_cache", v_cache))]
    inputs = [("key", "k", k), ("value", "v", v), ("slot_mapping", "slot_mapping", slot_mapping)]
    inputs += [(name, name, scale) for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)) if scale is not None]
    read = [Argument.of(*argument) for argument in inputs]
    # The two caches of a layer reach into one another.
    params = Parameters("append_kv", values, written, read, outputs_apart=False)
    return row_variant("append_kv", k_cache, v_cache, k, v), params


_kept = Kept(_check)


def _stored_or_computed(cache: "torch.Tensor") -> tuple[str, ...]:
    own = dtype_name(cache)
    return COMPUTED if own in COMPUTED or own not in CACHED else (*COMPUTED, own)
