"""How tests reach a GPU, without one: copies that lie as the originals do, and what comes back from them."""

import pytest
import torch
from backends import lacks
from batches import assert_matches_oracle, make_batch
from on_gpu import Copies, CudaOnGpu


@pytest.fixture
def here():
    """Return the backend with the CPU in the place of the GPU."""
    return CudaOnGpu(device="cpu")


def test_copies_lie_and_share_memory_as_the_originals_do():
    whole = torch.arange(240.0).reshape(4, 6, 10)
    parts = [whole[1:, ::2, 3:9], whole[:, 1:5].transpose(0, 1)]
    copies = Copies("cpu")
    moved = [copies.of(part) for part in parts]
    for part, copy in zip(parts, moved, strict=True):
        assert torch.equal(copy, part)
        assert (copy.stride(), copy.storage_offset()) == (part.stride(), part.storage_offset())
        assert copy.data_ptr() != part.data_ptr()
    moved[0].fill_(-1.0)
    assert (moved[1][1, 1] == -1).any()
    assert whole.min() == 0
    copies.bring_back()
    assert (parts[0] == -1).all()


def test_attention_by_copies_matches_the_oracle(here):
    assert_matches_oracle(here.paged_attention, make_batch([(33, 1), (20, 20), (0, 0), (70, 3)]))


def test_attention_writes_to_the_output_that_was_given(here):
    batch = make_batch([(33, 1), (20, 20)])
    want = here.paged_attention(*batch.arrays())
    room = torch.full((21, 4, 96), torch.nan)
    assert here.paged_attention(*batch.arrays(), out=room[..., 8:72]).data_ptr() == room[..., 8:72].data_ptr()
    assert torch.equal(room[..., 8:72], want)
    assert room[..., :8].isnan().all()


def test_operations_change_the_originals(here):
    pool = torch.zeros(4, 2, 2, 1, 4, 8)
    here.append_kv(torch.ones(1, 1, 8), torch.full((1, 1, 8), 2.0), pool[:, 1, 0], pool[:, 1, 1], torch.tensor([5]))
    assert (pool[1, 1, 1, 0, 1] == 2).all()
    here.copy_blocks(pool, torch.tensor([[1, 3]], dtype=torch.int32))
    assert torch.equal(pool[3], pool[1])
    here.move_kv(pool, torch.tensor([[0, 5, 0]]))
    assert (pool[0, 1, 0, 0, 0] == 1).all()
    out = [torch.zeros(2, 1, 8) for _ in range(2)]
    tables = torch.tensor([[1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    assert here.gather_kv(pool[:, 1, 0], pool[:, 1, 1], *tables, out=out)[1] is out[1]
    assert (out[1][1] == 2).all()


@pytest.mark.parametrize("backend", ["gpu", "gpu-prefill", "cuda"])
def test_gpu_is_not_asked_for_what_its_kernels_refuse(backend):
    assert lacks({"backend": backend, "dtype": torch.float32})
    assert lacks({"backend": backend, "dtype": torch.float16, "q_dtype": torch.bfloat16})
    assert lacks({"backend": backend, "head_dim": 512})
    assert not lacks({"backend": backend, "dtype": torch.float8_e5m2, "q_dtype": torch.bfloat16})
