"""Caches whose blocks lie so far apart that offsets pass 32 bits: only pages that are touched cost memory."""

import pytest
import torch
from host_device import HostDevice, KernelFault, Memory, attention, cache_operations
from tight import make_tight_batch

STRIDE = 2**30 + 16  # elements; block 4 begins behind 2^32 of them
NUM_BLOCKS = 5
KERNELS = ["paged_decode", "paged_prefill"]
OVERFLOWS = ("place.block * block_stride", "static_cast<i32>(place.block) * static_cast<i32>(block_stride)")
WRAPS = ("place.block * block_stride", "static_cast<u32>(place.block) * static_cast<u32>(block_stride)")


def spread(memory, name, near, *, writable=False):
    """Return a copy of a cache whose blocks are STRIDE elements apart, in memory of its own."""
    inner = near[0].contiguous()
    num_bytes = ((NUM_BLOCKS - 1) * STRIDE + inner.numel()) * near.element_size()
    flat = torch.from_numpy(memory.reserve(name, num_bytes, writable=writable)).view(near.dtype)
    far = flat.as_strided(near.shape, (STRIDE, *inner.stride()))
    far.copy_(near)
    return far


def make_batch(dtype=torch.bfloat16):
    batch = make_tight_batch([(5, 1), (63, 30)], dtype=dtype, num_kv_heads=2)
    assert len(batch.pool) == NUM_BLOCKS
    return batch


def attend_far(kernel, edits=()):
    """Return what a kernel makes of a batch whose blocks are far apart."""
    batch, memory = make_batch(), Memory()
    batch.k_cache, batch.v_cache = spread(memory, "k", batch.k_cache), spread(memory, "v", batch.v_cache)
    return attention.paged_attention(HostDevice(memory=memory, edits={kernel: edits}), *batch.arrays(), kernel=kernel)


def attend_near(kernel):
    return attention.paged_attention(HostDevice(), *make_batch().arrays(), kernel=kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_fault_01_attention_reads_the_right_block_when_offsets_pass_32_bits(kernel):
    assert torch.equal(attend_far(kernel), attend_near(kernel))


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_offset_that_overflows_32_bits_is_found(kernel):
    with pytest.raises(KernelFault, match="UBSan: mul_overflow"):
        attend_far(kernel, [OVERFLOWS])


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_offset_that_wraps_at_32_bits_shows_in_the_result(kernel):
    assert not torch.equal(attend_far(kernel, [WRAPS]), attend_near(kernel))


def test_kernel_fault_02_append_kv_writes_the_right_block_when_strides_pass_32_bits():
    near = torch.zeros(2, NUM_BLOCKS, 2, 16, 64, dtype=torch.bfloat16)
    memory = Memory()
    far = [spread(memory, name, cache, writable=True) for name, cache in zip("kv", near, strict=True)]
    k, v = torch.randn(2, 6, 2, 64).bfloat16()
    slots = torch.tensor([79, 64, -1, 0, 17, 48])
    cache_operations.append_kv(HostDevice(), k, v, *near, slots)
    cache_operations.append_kv(HostDevice(memory=memory), k, v, *far, slots)
    assert torch.equal(torch.stack(far), near)


@pytest.mark.parametrize("operation", ["copy_blocks", "move_kv"])
def test_kernel_fault_02_blocks_and_tokens_move_right_when_strides_pass_32_bits(operation):
    near = torch.randn(NUM_BLOCKS, 2, 2, 2, 16, 64).bfloat16()
    memory = Memory()
    far = spread(memory, "pool", near, writable=True)
    pairs = torch.tensor([(4, 1), (0, 3)], dtype=torch.int32)
    moves = torch.tensor([(0, 79, 2), (0, 0, 70)])
    what = pairs if operation == "copy_blocks" else moves
    getattr(cache_operations, operation)(HostDevice(), near, what)
    getattr(cache_operations, operation)(HostDevice(memory=memory), far, what)
    assert torch.equal(far, near)
