import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedkv.attention import PagedAttention, paged_attention, torch_ops
from pagedkv.exceptions import InvalidArgumentError

LAYER = 1
SEQUENCES = [(33, 1), (20, 20), (70, 3)]
LAYOUTS = ["block", "layer"]


def planned(batch, device="cpu"):
    """Return the plan of a batch of the fixture's shape."""
    attention = PagedAttention(4, 2, 64, 16)
    attention.plan(batch.block_table.to(device), batch.seq_lens, batch.query_start_loc, batch.rows)
    return attention


def packed(batch):
    """Return the packed plan of a batch of the fixture's shape."""
    return planned(batch).pack()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_paged_attention_operation_reads_the_layer_of_the_pool(make_batch, layout):
    batch = make_batch(SEQUENCES, layout=layout)
    out = torch.ops.pagedkv.paged_attention(batch.q, batch.pool, LAYER, packed(batch))
    assert torch.equal(out, paged_attention(*batch.arrays()))


def test_paged_attention_operation_takes_every_option(make_batch):
    batch = make_batch(SEQUENCES)
    options = {"softmax_scale": 0.3, "soft_cap": 20.0, "sinks": torch.nn.Parameter(torch.ones(4))}
    out = torch_ops.paged_attention(batch.q, batch.pool, LAYER, packed(batch), **options)
    options["sinks"] = options["sinks"].detach()
    assert torch.equal(out, paged_attention(*batch.arrays(), **options))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_append_kv_operation_writes_the_layer_of_the_pool(make_pool, layout):
    pool = make_pool(5, 2, 4, 8, layout=layout, fill=0)
    k, v = torch.ones(3, 2, 8), torch.full((3, 2, 8), 2.0)
    torch.ops.pagedkv.append_kv(k, v, pool, LAYER, torch.tensor([9, -1, 4]))
    assert pool[:, LAYER, 0].nonzero()[:, [0, 2]].unique(dim=0).tolist() == [[1, 0], [2, 1]]
    assert pool[:, LAYER, 1].sum() == 2 * pool[:, LAYER, 0].sum() == pool.sum() * 2 / 3


def test_operations_do_the_same_where_kernels_are_launched(make_batch, place):
    batch = make_batch(SEQUENCES, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 2, 64).bfloat16()
    torch_ops.append_kv(k, v, batch.pool, LAYER, torch.tensor([18]))
    want = paged_attention(*batch.arrays())
    launching, device = place
    with launching:
        pool, attention = batch.pool.to(device, copy=True), planned(batch, device)
        torch_ops.append_kv(*(array.to(device) for array in (k, v)), pool, LAYER, torch.tensor([18], device=device))
        found = torch_ops.paged_attention(batch.q.to(device), pool, LAYER, attention.pack())
    torch.testing.assert_close(found.cpu().float(), want.float(), atol=0.02, rtol=0.02)


def test_operations_take_scales_when_the_pool_is_fp8(make_batch, make_pool):
    batch = make_batch([(1, 1)])
    pool = make_pool(4, 2, 16, 64, dtype=torch.float8_e4m3fn, fill=0)
    scales = {"k_scale": torch.ones(1), "v_scale": torch.tensor([10.0, 20.0])}
    slots = batch.block_table[batch.rows].long()[:, 0] * 16
    torch_ops.append_kv(torch.ones(1, 2, 64), torch.full((1, 2, 64), 40.0), pool, LAYER, slots, **scales)
    out = torch_ops.paged_attention(batch.q, pool, LAYER, packed(batch), **scales)
    assert out.eq(40).all()
    assert pool[:, LAYER, 1].float().unique().tolist() == [0, 2, 4]


def test_append_kv_operation_declares_that_it_changes_the_pool():
    arguments = torch.ops.pagedkv.append_kv.default._schema.arguments
    assert [argument.name for argument in arguments if argument.is_write] == ["pool"]


def test_append_kv_operation_passes_the_checks_of_torch(make_pool):
    k = torch.ones(3, 2, 8)
    torch.library.opcheck(torch_ops.append_kv, (k, k, make_pool(5, 2, 4, 8), LAYER, torch.tensor([9, -1, 4])))


def test_paged_attention_operation_passes_the_checks_of_torch(make_batch):
    batch = make_batch(SEQUENCES, fill=0)
    torch.library.opcheck(torch_ops.paged_attention, (batch.q, batch.pool, LAYER, packed(batch)))


@pytest.mark.parametrize("layer", [-1, 3])
def test_operations_name_the_layer_when_the_pool_has_none_such(make_batch, layer):
    batch = make_batch(SEQUENCES)
    with pytest.raises(InvalidArgumentError, match=f"^layer: expected 0 to 2, found {layer}$"):
        torch_ops.paged_attention(batch.q, batch.pool, layer, packed(batch))


def test_operations_name_the_pool_when_it_is_a_view_of_one_layer(make_batch):
    batch = make_batch(SEQUENCES)
    with pytest.raises(InvalidArgumentError, match=r"^pool: expected shape \(num_blocks, num_layer_slots, 2, "):
        torch_ops.paged_attention(batch.q, batch.pool[:, LAYER], LAYER, packed(batch))


def test_paged_attention_operation_names_the_plan_when_it_is_none(make_batch):
    batch = make_batch(SEQUENCES)
    with pytest.raises(InvalidArgumentError, match="^plan: expected what pack"):
        torch_ops.paged_attention(batch.q, batch.pool, LAYER, torch.zeros(9, dtype=torch.int32))


@pytest.fixture(scope="module")
def compiled():
    """Return what `compiled_model.py` found, by layout."""
    program = [sys.executable, Path(__file__).with_name("compiled_model.py"), *LAYOUTS]
    run = subprocess.run(program, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_model_computes_what_the_eager_one_does_for_every_batch_and_plan(compiled, layout):
    assert max(compiled[layout]["differences"]) < 1e-5
    assert compiled[layout]["same_cache"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_model_takes_no_more_memory_than_the_eager_one(compiled, layout):
    found = compiled[layout]
    assert found["compiled_bytes"] <= 1.01 * found["eager_bytes"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_peak_of_memory_would_show_a_clone_of_the_cache(compiled, layout):
    found = compiled[layout]
    assert found["clone_bytes"] > found["eager_bytes"] + 0.9 * found["pool_bytes"] > 1.05 * found["eager_bytes"]
