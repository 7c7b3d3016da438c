"""What append_kv and gather_kv share: which variant moves rows of a cache, and how a cache is described."""

import functools
import math
from typing import TYPE_CHECKING, Any

from pagedkv.exceptions import InvalidArgumentError
from pagedkv.kernels import variants
from pagedkv.kernels.dims import LAYER, TYPE_CODES, check_scale, dtype_name, strides
from pagedkv.kernels.variants import Variant

if TYPE_CHECKING:
    import torch

_copying = functools.cache(variants.copying)
_converting = functools.cache(variants.converting)


def check_sizes(*tensors: "torch.Tensor") -> None:
    """Refuse caches whose blocks or rows have no elements."""
    for tensor in tensors:
        for name, size in zip(LAYER[1:], tensor.shape[1:], strict=True):
            if size == 0:
                raise InvalidArgumentError(f"{name}: expected at least 1, found 0")


def check_same_type(argument: str, tensor: "torch.Tensor", other_argument: str, other: "torch.Tensor") -> None:
    """Refuse keys and values of two types, which no kernel takes."""
    if tensor.dtype != other.dtype:
        found = f"{dtype_name(tensor)} and {dtype_name(other)}"
        raise TypeError(f"{argument}, {other_argument}: expected one dtype for both on a GPU, found {found}")


def copying_variant(kernel: str, *tensors: "torch.Tensor") -> Variant:
    """Return the variant that moves rows by the widest vectors that divide every address, stride and row."""
    element_bytes = tensors[0].element_size()
    whole = [variants.VECTOR_BYTES[0]]
    for tensor in tensors:
        whole.append(tensor.data_ptr())
        whole += [size * element_bytes for size in (*strides(tensor)[:-1], tensor.shape[-1])]
    return _copying(kernel, variants.widest_vector(math.gcd(*whole), element_bytes))


def row_variant(kernel: str, *tensors: "torch.Tensor") -> Variant:
    """Return the variant that moves rows of head_dim elements: as they are where all tensors have one type."""
    if len({tensor.dtype for tensor in tensors}) == 1:
        return copying_variant(kernel, *tensors)
    elements = math.gcd(*(size for tensor in tensors for size in (*strides(tensor)[:-1], tensor.shape[-1])))
    aligned = all(tensor.data_ptr() % min(16, 8 * tensor.element_size()) == 0 for tensor in tensors)
    return _converting(kernel, 8 if elements % 8 == 0 and aligned else 1)


def layout(cache: "torch.Tensor") -> tuple[int, ...]:
    """Return the strides of one layer's keys or values: of a block, a head and a slot."""
    return strides(cache)[:3]


def cache_values(
    k_cache: "torch.Tensor",
    v_cache: "torch.Tensor",
    k_scale: "torch.Tensor | None",
    v_scale: "torch.Tensor | None",
) -> dict[str, Any]:
    """Return the parameters that say what the caches of a layer are like."""
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    return {
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "k_layout": layout(k_cache),
        "v_layout": layout(v_cache),
        "k_scale_stride": scale_stride("k_scale", k_scale, k_cache),
        "v_scale_stride": scale_stride("v_scale", v_scale, v_cache),
    }


def scale_stride(argument: str, scale: "torch.Tensor | None", cache: "torch.Tensor") -> int:
    """Return the elements from one KV head's scale to the next one's, 0 where one serves all; refuses other scales."""
    if scale is None:
        return 0
    check_scale(argument, scale, cache)
    return strides(scale)[0]


def type_code(tensor: "torch.Tensor") -> int:
    """Return the number of an element type in the kernels."""
    return TYPE_CODES[dtype_name(tensor)]
