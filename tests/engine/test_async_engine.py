"""The engine behind asyncio: streams, cancellation, and what happens when a step fails."""

import asyncio

import pytest

from pagedkv import AsyncLLMEngine, RequestOutputKind, SamplingParams
from pagedkv.exceptions import EngineDeadError, InvalidArgumentError, QueueFullError, StateError

PROMPT = [9] * 20
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
DELTA = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture
def make(tiny_model, letters):
    """Return a function that makes engines, and shut them down."""
    engines = []

    def make(**options):
        engines.append(AsyncLLMEngine(tiny_model, letters, block_size=8, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


async def last(engine, prompt, params=GREEDY, **options):
    async for output in engine.generate(prompt, params, **options):
        found = output
    return found


async def until_busy(engine):
    """Wait until a block is held."""
    while engine.engine.scheduler.usage == 0:
        await asyncio.sleep(0.005)


async def until_idle(engine):
    """Wait until no block is held; fail after a while."""
    for _ in range(200):
        if engine.engine.scheduler.usage == 0 and not engine.engine.scheduler.has_unfinished_requests():
            engine.engine.scheduler.check_integrity()
            return
        await asyncio.sleep(0.02)
    raise AssertionError("blocks are still held")


def test_requests_of_many_tasks_run_in_one_batch(make, tiny_model, open_llm):
    prompts = [PROMPT, [5, 6], list(range(30, 60)), [7]]
    with open_llm(tiny_model, block_size=8) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    engine = make()

    async def main():
        return await asyncio.gather(*(last(engine, prompt) for prompt in prompts))

    outputs = asyncio.run(main())
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_deltas_are_together_the_whole_when_the_reader_is_slow(make):
    engine = make()

    async def main():
        whole = await last(engine, PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        tokens, text, num_outputs = [], "", 0
        async for output in engine.generate(PROMPT, DELTA):
            await asyncio.sleep(0.05 if num_outputs == 1 else 0)
            num_outputs += 1
            tokens += output.outputs[0].token_ids
            text += output.outputs[0].text
        assert (tokens, text) == (whole.outputs[0].token_ids, whole.outputs[0].text)

    asyncio.run(main())


def test_cancelled_task_frees_its_blocks(make):
    engine = make()

    async def main():
        task = asyncio.create_task(last(engine, PROMPT, LONG))
        await until_busy(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(engine)
        assert len((await last(engine, PROMPT)).outputs[0].token_ids) == 12

    asyncio.run(main())


def test_closed_iterator_frees_its_blocks_while_others_run(make):
    engine = make()

    async def main():
        other = asyncio.create_task(last(engine, [5, 6], LONG))
        iterator = engine.generate(PROMPT, LONG)
        await anext(iterator)
        await iterator.aclose()
        steps = []
        engine.engine.step_hooks.append(lambda event: steps.append(len(event.plan.handles)))
        await asyncio.sleep(0.2)
        assert set(steps[2:]) == {1}
        assert len((await other).outputs[0].token_ids) == 200
        await until_idle(engine)

    asyncio.run(main())


def test_aborted_request_ends_with_that_reason(make):
    engine = make()

    async def main():
        async def abort():
            await until_busy(engine)
            await engine.abort("a")

        output, _ = await asyncio.gather(last(engine, PROMPT, LONG, request_id="a"), abort())
        assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
        await until_idle(engine)
        assert (await last(engine, PROMPT, request_id="a")).finished

    asyncio.run(main())


def test_wrong_request_is_told_to_its_task_alone(make):
    engine = make()

    async def main():
        wrong, right = await asyncio.gather(last(engine, [999]), last(engine, PROMPT), return_exceptions=True)
        assert isinstance(wrong, InvalidArgumentError)
        assert right.finished

    asyncio.run(main())


def test_request_id_that_is_in_use_is_refused(make):
    engine = make()

    async def main():
        iterator = engine.generate(PROMPT, LONG, "a")
        await anext(iterator)
        with pytest.raises(InvalidArgumentError, match="^request_id: "):
            await last(engine, PROMPT, request_id="a")
        await iterator.aclose()

    asyncio.run(main())


def test_request_is_refused_when_the_queue_is_full(make):
    engine = make(max_num_seqs=1, max_queued_requests=1)

    async def main():
        tasks = [asyncio.create_task(last(engine, PROMPT, LONG)) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFullError):
            await last(engine, PROMPT)
        await asyncio.gather(*tasks)
        assert (await last(engine, PROMPT)).finished

    asyncio.run(main())


def test_failed_step_is_told_to_every_request_and_to_those_that_come(make, tiny_model):
    engine = make()

    def fail(module, arguments):
        raise MemoryError("no room for activations")

    async def main():
        running = asyncio.create_task(last(engine, PROMPT, LONG))
        await until_busy(engine)
        tiny_model.register_forward_pre_hook(fail)
        with pytest.raises(EngineDeadError, match="no room for activations"):
            await running
        assert engine.errored
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await last(engine, PROMPT)

    asyncio.run(main())


def test_shutdown_tells_what_runs(make):
    engine = make()

    async def main():
        running = asyncio.create_task(last(engine, PROMPT, LONG))
        await until_busy(engine)
        await asyncio.to_thread(engine.shutdown)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineDeadError, match="closed"):
            await running
        with pytest.raises(StateError):
            await last(engine, PROMPT)

    asyncio.run(main())


def test_engine_outlives_an_event_loop_that_ended_early(make):
    engine = make()

    async def leave():
        iterator = engine.generate(PROMPT, LONG)
        await anext(iterator)

    asyncio.run(leave())

    async def main():
        await until_idle(engine)
        return await last(engine, PROMPT)

    assert asyncio.run(main()).finished
