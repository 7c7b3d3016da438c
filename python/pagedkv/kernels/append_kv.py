"""Launches `append_kv`: writes keys and values of new tokens into their slots."""

from typing import TYPE_CHECKING

from pagedkv.exceptions import InvalidArgumentError
from pagedkv.kernels.dims import CACHED, COMPUTED, LAYER, Dims, check_written, dtype_name, strides
from pagedkv.kernels.launch import Arrays, launcher_of, run
from pagedkv.kernels.rows import cache_values, check_same_type, check_sizes, row_variant, type_code

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
    dims = Dims(k_cache.device)
    dims.check("k", k, _ROWS, _stored_or_computed(k_cache))
    dims.check("v", v, _ROWS, _stored_or_computed(v_cache))
    dims.check("k_cache", k_cache, LAYER, CACHED)
    dims.check("v_cache", v_cache, LAYER, CACHED)
    dims.check("slot_mapping", slot_mapping, ("num_tokens",), ("int64",))
    check_same_type("k", k, "v", v)
    check_same_type("k_cache", k_cache, "v_cache", v_cache)
    check_sizes(k_cache)
    scales: Arrays = {"k_scale": k_scale, "v_scale": v_scale}
    inputs = {"k": k, "v": v, "slot_mapping": slot_mapping, **scales}
    check_written("k_cache", k_cache, inputs)
    check_written("v_cache", v_cache, inputs)
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
    arrays = {"k_cache": k_cache, "v_cache": v_cache, "key": k, "value": v, "slot_mapping": slot_mapping, **scales}
    variant = row_variant("append_kv", k_cache, v_cache, k, v)
    run(launcher_of(k_cache.device), variant, arrays, values, _WRITTEN, dims["num_tokens"])


def _stored_or_computed(cache: "torch.Tensor") -> tuple[str, ...]:
    own = dtype_name(cache)
    return COMPUTED if own in COMPUTED or own not in CACHED else (*COMPUTED, own)
