"""Samples of a request share blocks, and seeds decide their tokens."""

import pytest

from pagedkv import LLM, SamplingParams

BLOCK_SIZE = 8
NUM_BLOCKS_OF_20 = 3


@pytest.fixture
def llm(tiny_model, open_llm):
    with open_llm(tiny_model, block_size=BLOCK_SIZE) as llm:
        yield llm


def watch(llm):
    """Return a list that is filled with (copies, block tables, counts) of handle 0, one entry per step."""
    seen = []

    def look(event):
        if event.result.finished:
            return
        tables = [llm.scheduler.block_table(0, sample) for sample in range(3)]
        counts = [None if table is None else llm.scheduler.ref_counts(table).tolist() for table in tables]
        tables = [None if table is None else table.tolist() for table in tables]
        seen.append((event.plan.copies.tolist(), tables, counts))

    llm.step_hooks.append(look)
    return seen


def sampled(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_samples_share_all_blocks_when_the_prompt_is_computed(llm):
    seen = watch(llm)
    llm.generate([5] * 20, SamplingParams(n=3, max_tokens=4, seed=1), use_tqdm=False)
    copies, tables, counts = seen[0]
    assert copies == []
    assert tables[0] == tables[1] == tables[2]
    assert counts[0] == [3] * NUM_BLOCKS_OF_20


def test_samples_copy_the_partial_block_when_they_first_write_it(llm):
    seen = watch(llm)
    llm.generate([5] * 20, SamplingParams(n=3, max_tokens=4, seed=1), use_tqdm=False)
    copies, tables, counts = seen[1]
    assert [source for source, _ in copies] == [tables[2][2]] * 2
    assert [target for _, target in copies] == [tables[0][2], tables[1][2]]
    assert counts == [[3, 3, 1]] * 3
    assert [step_copies for step_copies, _, _ in seen[2:]] == [[]] * len(seen[2:])


def test_samples_copy_nothing_when_the_prompt_fills_its_blocks(llm):
    seen = watch(llm)
    llm.generate([5] * 16, SamplingParams(n=3, max_tokens=4, seed=1), use_tqdm=False)
    assert [copies for copies, _, _ in seen] == [[]] * len(seen)
    assert seen[1][2] == [[3, 3, 1]] * 3


def test_samples_come_back_by_index_and_differ(llm):
    output = llm.generate([5] * 20, SamplingParams(n=3, max_tokens=8, seed=1), use_tqdm=False)[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


def test_samples_end_on_their_own(llm):
    whole = llm.generate([5] * 20, SamplingParams(n=3, max_tokens=8, seed=1), use_tqdm=False)[0].outputs
    stop = next(token for token in whole[1].token_ids if token not in whole[0].token_ids + whole[2].token_ids)
    end = whole[1].token_ids.index(stop) + 1
    params = SamplingParams(n=3, max_tokens=8, seed=1, stop_token_ids=[stop])
    ended = llm.generate([5] * 20, params, use_tqdm=False)[0].outputs
    assert [len(completion.token_ids) for completion in ended] == [8, end, 8]
    assert [completion.finish_reason for completion in ended] == ["length", "stop", "length"]


OTHERS = [[7] * 30, [9], list(range(50, 90))]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_plans_in_flight": 2}, {"max_num_batched_tokens": 16}, {"num_blocks": 24}],
    ids=["plain", "two_plans_in_flight", "chunks", "preemption"],
)
def test_seeded_samples_are_the_same_whatever_else_runs(tiny_model, llm, open_llm, options):
    params = SamplingParams(n=3, max_tokens=20, seed=7, temperature=0.8, top_k=40, top_p=0.9)
    alone = sampled(llm.generate([5] * 20, params, use_tqdm=False))[0]
    rest = SamplingParams(n=2, max_tokens=20)
    with open_llm(tiny_model, block_size=BLOCK_SIZE, **options) as other:
        crowd = other.generate([*OTHERS, [5] * 20], [rest] * 3 + [params], use_tqdm=False)
        assert (other.scheduler.num_preemptions > 0) == ("num_blocks" in options)
    assert sampled(crowd)[3] == alone


def test_unseeded_requests_differ_from_one_another(llm):
    outputs = llm.generate([[5] * 20] * 2, SamplingParams(max_tokens=8), use_tqdm=False)
    assert sampled(outputs)[0] != sampled(outputs)[1]


def test_unseeded_requests_follow_the_seed_of_the_llm(tiny_model):
    def run(seed):
        with LLM(tiny_model, seed=seed) as llm:
            return sampled(llm.generate([[5] * 20, [6]], SamplingParams(max_tokens=8), use_tqdm=False))

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_requests_with_one_prompt_share_its_blocks_within_a_step(llm):
    outputs = llm.generate([[5] * 20] * 4, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 16, 16]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
