"""How many blocks of a variant fit on a multiprocessor, and what they then have under way.

`python -m pagedkv.kernels.occupancy` prints the table of docs/kernels.md. It is counted with the registers that a
variant may use, which the compiled ones are held to, and so holds for every compiler that keeps to them.
"""

import sys
from dataclasses import dataclass

from pagedkv.kernels.variants import (
    ELEMENT_BYTES,
    HEAD_DIM_CLASSES,
    REGISTERS_OF_MULTIPROCESSOR,
    Variant,
    paged_decode,
    paged_prefill,
)


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of an architecture: CUDA C++ Programming Guide, technical specifications per compute capability."""

    shared_kib: int
    block_shared_kib: int
    threads: int
    blocks: int


LIMITS = {
    "sm_80": Multiprocessor(164, 163, 2048, 32),
    "sm_86": Multiprocessor(100, 99, 1536, 16),
    "sm_89": Multiprocessor(100, 99, 1536, 24),
    "sm_90": Multiprocessor(228, 227, 2048, 32),
    "sm_100": Multiprocessor(228, 227, 2048, 32),
    "sm_120": Multiprocessor(100, 99, 1536, 24),
}
_RESERVED_SHARED_BYTES = 1024  # per block, for the system


def blocks_per_multiprocessor(variant: Variant, arch: str) -> int:
    """Return how many blocks of a variant run side by side; 0 where not one does."""
    limits = LIMITS[arch.rstrip("af")]
    if variant.shared_bytes > limits.block_shared_kib * 1024:
        return 0
    registers = -(-variant.registers // 8) * 8 * variant.threads  # handed out by eights per thread
    shared = -(-(variant.shared_bytes + _RESERVED_SHARED_BYTES) // 128) * 128
    by_memory = (REGISTERS_OF_MULTIPROCESSOR // registers, limits.shared_kib * 1024 // shared)
    return min(*by_memory, limits.threads // variant.threads, limits.blocks)


def bytes_under_way(variant: Variant) -> int:
    """Return the bytes of keys and values that a block of an attention kernel has on their way while it computes."""
    macros = variant.macros
    row_bytes = int(macros["PKV_HEAD_DIM"]) * (1 if macros["PKV_KV"] in ("E4M3", "E5M2") else 2)
    if variant.kernel == "paged_decode":
        return (int(macros["PKV_STAGES"]) - 1) * int(macros["PKV_WARPS"]) * 16 * 2 * row_bytes
    return int(macros["PKV_KEYS"]) * 2 * row_bytes


def occupancy_table() -> str:
    """Return the table as Markdown."""
    archs = ("sm_80", "sm_86", "sm_90")
    heads = ["kernel", "head_dim up to", "cache", "threads", "registers", "shared memory", "KV under way per block"]
    heads += ["blocks on sm_80", "on sm_86, sm_89, sm_120", "on sm_90, sm_100"]
    rows = [heads, ["---"] * len(heads)]
    for kernel in (paged_decode, paged_prefill):
        for head_dim in HEAD_DIM_CLASSES:
            for dtype in ("bfloat16", "float8_e4m3fn"):
                variant = kernel("bfloat16", dtype, head_dim, features=True)
                cells = [f"`{variant.kernel}`", head_dim, f"{ELEMENT_BYTES[dtype] * 8} bit", variant.threads]
                cells += [variant.registers, f"{variant.shared_bytes / 1024:.1f} KiB"]
                cells += [f"{bytes_under_way(variant) / 1024:g} KiB"]
                cells += [blocks_per_multiprocessor(variant, arch) for arch in archs]
                rows.append([str(cell) for cell in cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.stdout.write(occupancy_table() + "\n")
