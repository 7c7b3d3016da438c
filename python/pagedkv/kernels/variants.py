"""The one table of variants: what is compiled of each kernel, its shape, and what it may use.

A variant is what a launch chooses by types, by a head dimension rounded up to its class, and by whether any feature
beyond causal attention is asked for. Everything else, group size and block size among it, is said at run time.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import product
from types import MappingProxyType

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
TAGS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}

QUERY_DTYPES = ("float16", "bfloat16")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
DTYPE_PAIRS = tuple((q, kv) for q in QUERY_DTYPES for kv in (q, *FP8_DTYPES))
HEAD_DIM_CLASSES = (64, 128, 192, 256)
VECTOR_BYTES = (16, 4, 2, 1)
REGISTERS_OF_MULTIPROCESSOR = 65_536


@dataclass(frozen=True)
class Variant:
    """A kernel as it is compiled.

    Attributes
    ----------
    kernel : str
        The kernel's file and entry.
    macros : mapping of str to int or str
        What specialises it.
    threads : int
        Threads of a block.
    registers : int
        The most registers that a thread may use: so many that the blocks its shape is made for fit side by side.
    shared_bytes : int
        Dynamic shared memory of a block.
    rows : int
        Query rows of a work item, where there are such.
    """

    kernel: str
    macros: Mapping[str, int | str] = field(hash=False)
    threads: int
    registers: int
    shared_bytes: int = 0
    rows: int = 0

    @property
    def name(self) -> str:
        """The kernel and the values of its macros."""
        return "-".join([self.kernel, *map(str, self.macros.values())])


@dataclass(frozen=True)
class _DecodeShape:
    warps: int
    stages: Mapping[int, int]  # by bytes of a cached element
    registers: int


# As many stages as fit into 99 KiB, all that a block of sm_86, sm_89 and sm_120 has; two or more such fit on sm_90.
_DECODE = {
    64: _DecodeShape(4, {2: 4, 1: 4}, 128),
    128: _DecodeShape(4, {2: 3, 1: 4}, 168),
    192: _DecodeShape(4, {2: 2, 1: 4}, 255),
    256: _DecodeShape(2, {2: 2, 1: 4}, 255),
}


@dataclass(frozen=True)
class _PrefillShape:
    row_tiles: int
    keys: int
    step_keys: int


# Results of two row tiles take as many registers at 128 elements as those of one at 256.
_PREFILL = {
    64: _PrefillShape(row_tiles=2, keys=64, step_keys=32),
    128: _PrefillShape(row_tiles=2, keys=32, step_keys=16),
    192: _PrefillShape(row_tiles=1, keys=32, step_keys=32),
    256: _PrefillShape(row_tiles=1, keys=32, step_keys=16),
}


def head_dim_class(head_dim: int) -> int:
    """Return the class of a head dimension: the smallest one that is not below it."""
    for largest in HEAD_DIM_CLASSES:
        if 0 < head_dim <= largest and head_dim % 8 == 0:
            return largest
    raise ValueError(f"head_dim: expected a multiple of 8 up to {HEAD_DIM_CLASSES[-1]}, found {head_dim}")


def paged_decode(q_dtype: str, kv_dtype: str, head_dim: int, *, features: bool) -> Variant:
    """Return the variant of `paged_decode` for types and a head dimension."""
    check_pair(q_dtype, kv_dtype)
    padded = head_dim_class(head_dim)
    shape, element_bytes = _DECODE[padded], ELEMENT_BYTES[kv_dtype]
    stages = shape.stages[element_bytes]
    # The layout of `Shared` in the kernel, which asserts the sum: stages, where rows lie, exponents, queries.
    shared_bytes = stages * shape.warps * 2 * 16 * padded * element_bytes + shape.warps * 32 * 16 + 16 * 4
    if padded == 256:
        shared_bytes += 16 * padded * 2
    macros = _attention_macros(q_dtype, kv_dtype, padded, features) | {
        "PKV_WARPS": shape.warps,
        "PKV_STAGES": stages,
        "PKV_BLOCKS": REGISTERS_OF_MULTIPROCESSOR // (shape.warps * 32 * shape.registers),
        "PKV_SHARED_BYTES": shared_bytes,
    }
    return _variant("paged_decode", macros, shape.warps * 32, shape.registers, shared_bytes, 16)


def paged_prefill(q_dtype: str, kv_dtype: str, head_dim: int, *, features: bool) -> Variant:
    """Return the variant of `paged_prefill` for types and a head dimension."""
    check_pair(q_dtype, kv_dtype)
    padded = head_dim_class(head_dim)
    shape, rows = _PREFILL[padded], 4 * 16 * _PREFILL[padded].row_tiles
    # The layout of `Shared` in the kernel: two stages of keys and values, queries, where rows lie, exponents.
    shared_bytes = (
        2 * 2 * shape.keys * padded * ELEMENT_BYTES[kv_dtype] + rows * padded * 2 + 2 * shape.keys * 16 + rows * 4
    )
    macros = _attention_macros(q_dtype, kv_dtype, padded, features) | {
        "PKV_ROW_TILES": shape.row_tiles,
        "PKV_KEYS": shape.keys,
        "PKV_STEP_KEYS": shape.step_keys,
        "PKV_SHARED_BYTES": shared_bytes,
    }
    return _variant("paged_prefill", macros, 128, 255, shared_bytes, rows)


def merge_partials(q_dtype: str) -> Variant:
    """Return the variant of `merge_partials` for an output's type."""
    if q_dtype not in QUERY_DTYPES:
        raise TypeError(f"q: expected {' or '.join(QUERY_DTYPES)}, found {q_dtype}")
    return _variant("merge_partials", {"PKV_Q": TAGS[q_dtype]}, 128, 64)


def merge_states() -> Variant:
    """Return the one variant of `merge_states`."""
    return _variant("merge_states", {}, 128, 64)


def widest_vector(divided: int, element_bytes: int) -> int:
    """Return the widest vector of whole elements that divides `divided` bytes, a multiple of an element."""
    return next(width for width in VECTOR_BYTES if divided % width == 0 and width % element_bytes == 0)


def copying(kernel: str, vector_bytes: int) -> Variant:
    """Return the variant of a copying kernel that moves vectors of so many bytes."""
    threads, registers, converts = _COPYING[kernel]
    macros = {"PKV_VECTOR_BYTES": vector_bytes} | ({"PKV_ELEMENTS": 0} if converts else {})
    return _variant(kernel, macros, threads, registers)


def converting(kernel: str, elements: int) -> Variant:
    """Return the variant of a kernel that converts so many elements, 1 or 8, at a time."""
    threads, registers, _ = _COPYING[kernel]
    return _variant(kernel, {"PKV_VECTOR_BYTES": 0, "PKV_ELEMENTS": elements}, threads, registers)


# Threads of a block, the most registers, and whether a kernel converts too.
_COPYING = {
    "append_kv": (128, 64, True),
    "copy_blocks": (256, 64, False),
    "gather_kv": (128, 64, True),
    "move_kv": (128, 80, False),
}


def check_pair(q_dtype: str, kv_dtype: str) -> None:
    """Refuse types of queries and cache for which there is no attention kernel."""
    if q_dtype not in QUERY_DTYPES:
        raise TypeError(f"q: expected {' or '.join(QUERY_DTYPES)}, found {q_dtype}")
    if (q_dtype, kv_dtype) not in DTYPE_PAIRS:
        expected = " or ".join((q_dtype, *FP8_DTYPES))
        raise TypeError(f"k_cache, v_cache: expected {expected} beside {q_dtype} queries on a GPU, found {kv_dtype}")


def _attention_macros(q_dtype: str, kv_dtype: str, padded: int, features: bool) -> dict[str, int | str]:
    return {
        "PKV_Q": TAGS[q_dtype],
        "PKV_KV": TAGS[kv_dtype],
        "PKV_HEAD_DIM": padded,
        "PKV_FEATURES": int(features),
    }


def _variant(
    kernel: str, macros: Mapping[str, int | str], threads: int, registers: int, shared_bytes: int = 0, rows: int = 0
) -> Variant:
    return Variant(kernel, MappingProxyType(dict(macros)), threads, registers, shared_bytes, rows)


VARIANTS: tuple[Variant, ...] = (
    *(
        attention(q, kv, head_dim, features=features)
        for attention, (q, kv), head_dim, features in product(
            (paged_decode, paged_prefill), DTYPE_PAIRS, HEAD_DIM_CLASSES, (False, True)
        )
    ),
    *(merge_partials(q) for q in QUERY_DTYPES),
    merge_states(),
    *(copying(kernel, vector) for kernel, vector in product(_COPYING, VECTOR_BYTES)),
    *(converting(kernel, elements) for kernel in _COPYING if _COPYING[kernel][2] for elements in (8, 1)),
)


def variants_of(q_dtype: str | None, kv_dtype: str | None, classes: Collection[int] | None) -> list[Variant]:
    """Return what a model needs: its attention, and all kernels that know no such types.

    Parameters
    ----------
    q_dtype, kv_dtype : str or None
        Types of the queries and of the cache; None for all.
    classes : collection of int or None
        Classes of head dimensions; None for all.
    """

    def is_needed(variant: Variant) -> bool:
        macros = variant.macros
        return (
            (q_dtype is None or macros.get("PKV_Q", TAGS[q_dtype]) == TAGS[q_dtype])
            and (kv_dtype is None or macros.get("PKV_KV", TAGS[kv_dtype]) == TAGS[kv_dtype])
            and (classes is None or macros.get("PKV_HEAD_DIM", min(classes)) in classes)
        )

    return [variant for variant in VARIANTS if is_needed(variant)]
