"""An interrupt between two bytecodes of the loop, whichever, leaves the engine usable."""

import contextlib
import sys

import pytest

from pagedkv import SamplingParams

PROMPTS = [[5] * 9, [6, 7]]
STRIDE = 13  # of some 2,000 bytecodes
FILES = ("engine/loop.py", "engine/runner.py")
GREEDY = SamplingParams(temperature=0, max_tokens=3)


class InterruptBefore:
    """Raises KeyboardInterrupt before the bytecode of the given number in the loop's files; a context manager."""

    def __init__(self, number):
        self.remaining = number

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.remaining -= 1
            if self.remaining == 0:
                raise KeyboardInterrupt
        return self.trace


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
def test_llm_remains_usable_when_interrupted_anywhere(tiny_model, open_llm, max_plans_in_flight):
    tiny_model.config.num_hidden_layers = 1
    tiny_model.model.layers = tiny_model.model.layers[:1]
    with open_llm(tiny_model, block_size=8, num_blocks=16, max_plans_in_flight=max_plans_in_flight) as llm:
        expected = [output.outputs for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        number, was_interrupted = max_plans_in_flight, True
        while was_interrupted:
            with InterruptBefore(number) as interrupt, contextlib.suppress(KeyboardInterrupt):
                llm.generate(PROMPTS, SamplingParams(n=2, max_tokens=2), use_tqdm=False)
            was_interrupted = interrupt.remaining <= 0
            number += STRIDE
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [output.outputs for output in outputs] == expected
            assert llm.scheduler.usage == 0
            llm.scheduler.check_integrity()
        assert number > 500
