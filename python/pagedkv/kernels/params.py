"""The parameter structs of the kernels, as NumPy lays them out: a launch passes one element of such an array by value.

Names and order are those of the sources. A test compares offsets with the sources, and sizes with the compiler's.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

_POINTER, _I64, _I32, _F32 = "u8", "i8", "i4", "f4"
_LAYOUT = np.dtype([(name, _I64) for name in ("block_stride", "head_stride", "slot_stride")])


def _struct(*groups: tuple[Any, str]) -> np.dtype[Any]:
    """Return an aligned struct from groups of a type and the names of its fields."""
    return np.dtype([(name, kind) for kind, names in groups for name in names.split()], align=True)


PARAMS: Mapping[str, np.dtype[Any]] = {
    "append_kv": _struct(
        (_POINTER, "k_cache v_cache key value slot_mapping k_scale v_scale"),
        (_I32, "num_tokens num_kv_heads head_dim block_size cache_type input_type k_scale_stride v_scale_stride"),
        (_LAYOUT, "k_layout v_layout"),
        (_I64, "key_token_stride key_head_stride value_token_stride value_head_stride"),
    ),
    "copy_blocks": _struct(
        (_POINTER, "cache copies"),
        (_I64, "span_size"),
        (_I32, "num_copies num_spans"),
        (_I64, "block_stride span_stride"),
        (_I32, "element_bytes unused"),
    ),
    "gather_kv": _struct(
        (_POINTER, "k_out v_out k_cache v_cache block_table token_starts rows k_scale v_scale"),
        (_I32, "num_tokens num_seqs num_kv_heads head_dim block_size"),
        (_I32, "out_type cache_type k_scale_stride v_scale_stride unused"),
        (_LAYOUT, "k_layout v_layout"),
        (_I64, "k_token_stride k_head_stride v_token_stride v_head_stride table_row_stride"),
    ),
    "merge_states": _struct(
        (_POINTER, "out lse out_a out_b lse_a lse_b"),
        (_I32, "num_tokens num_q_heads head_dim type"),
        (_I64, "out_token_stride out_head_stride a_token_stride a_head_stride b_token_stride b_head_stride"),
        (_I64, "lse_token_stride lse_a_token_stride lse_b_token_stride"),
    ),
    "move_kv": _struct(
        (_POINTER, "cache slot_moves"),
        (_I32, "num_moves group num_layers num_kv_heads block_size head_dim"),
        (_LAYOUT, "layout"),
        (_I64, "layer_stride side_stride"),
        (_I32, "element_bytes unused"),
    ),
    **dict.fromkeys(
        ("paged_decode", "paged_prefill", "merge_partials"),
        _struct(
            (_POINTER, "out lse partial_out partial_lse q k_cache v_cache block_table work merges k_scale v_scale"),
            (_POINTER, "alibi_slopes sinks tree_mask tree_depths"),
            (_LAYOUT, "k_layout v_layout"),
            (_I64, "q_token_stride q_head_stride out_token_stride out_head_stride lse_token_stride table_row_stride"),
            (_I32, "num_kv_heads group head_dim block_size k_scale_stride v_scale_stride slopes_type sinks_type"),
            (_I32, "sliding_window copy_bytes"),
            (_F32, "softmax_scale soft_cap"),
        ),
    ),
}

POINTERS: Mapping[str, tuple[str, ...]] = {
    kernel: tuple(name for name in struct.names or () if struct[name] == np.dtype(_POINTER))
    for kernel, struct in PARAMS.items()
}
"""The fields of each struct that point to arrays, which are its first ones."""


def pack(kernel: str, values: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return a kernel's parameters, one element of its struct.

    Parameters
    ----------
    kernel : str
        The kernel.
    values : mapping of str to int, float or tuple
        A value for each field; a layout is a tuple of its strides, a null pointer 0.

    Raises
    ------
    ValueError
        If a field has no value, or a value no field.
    """
    struct = PARAMS[kernel]
    if wrong := set(values) ^ set(struct.names or ()):
        raise ValueError(f"{kernel}: fields without a value, or values without a field: {', '.join(sorted(wrong))}")
    packed = np.zeros(1, struct)
    for name, value in values.items():
        packed[0][name] = value
    return packed
