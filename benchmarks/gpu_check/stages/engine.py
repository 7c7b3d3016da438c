"""The engine on the GPU: greedy tokens of a random model in bfloat16, against transformers' own."""

import logging
import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_check.runner import write_result
from pagedkv import LLM, SamplingParams
from pagedkv.engine.loop import StepEvent

PROMPT_LENGTHS = (1, 5, 16, 33, 90, 200, 450, 700)
MAX_TOKENS = 32
# Rounding that adds up tells two tokens apart whose logits lie nearer than this part of the largest one.
LEAST_MARGIN = 0.02
# Our engine goes on from transformers' own tokens every few of them, so that one near call does not hide the rest.
WINDOW = 4
BLOCK_SIZE = 16
# So many of all tokens must be compared for the stage to mean anything.
LEAST_COMPARED = 0.25


@dataclass(frozen=True)
class Window:
    """A prompt, and the greedy tokens behind it up to the first of which rounding might make another."""

    prompt: list[int]
    tokens: list[int]


def make_model(device: str, **sizes: Any) -> LlamaForCausalLM:
    """Return a model with random weights, so large that its output varies."""
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    model = LlamaForCausalLM(LlamaConfig(**(defaults | sizes))).to(torch.bfloat16)
    return model.to(device).eval()


def make_prompts(vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Return prompts of random tokens; the last two begin alike, so that one hits what the other left."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    shared = min(len(prompts[-1]), len(prompts[-2])) // 2
    prompts[-1][:shared] = prompts[-2][:shared]
    return prompts


@dataclass(frozen=True)
class Reference:
    """A prompt and the greedy tokens that transformers puts behind it; of each, whether rounding can't change it."""

    prompt: list[int]
    tokens: list[int]
    is_sure: list[bool]

    def window(self, start: int) -> Window:
        """Return the one behind the first ``start`` tokens."""
        sure = self.is_sure[start : start + WINDOW]
        count = [*sure, False].index(False)
        return Window(self.prompt + self.tokens[:start], self.tokens[start : start + count])

    def windows(self) -> list[Window]:
        """Return those that hold each token once."""
        return [self.window(start) for start in range(0, len(self.tokens), WINDOW)]

    def crossing(self) -> Window | None:
        """Return the first whose prompt fills its last block, so that the next step needs another, if there is one."""
        start = -len(self.prompt) % BLOCK_SIZE
        return self.window(start) if start + WINDOW <= len(self.tokens) else None


def ask_transformers(model: LlamaForCausalLM, prompt: list[int], max_tokens: int) -> Reference:
    """Generate with its own attention and its own cache."""
    ids = torch.tensor([prompt], device=model.device)
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(result.logits).float().topk(2).values
    is_sure = ((best[:, 0] - best[:, 1]) >= LEAST_MARGIN * best[:, 0].abs()).tolist()
    return Reference(prompt, result.sequences[0, len(prompt) :].tolist(), is_sure)


def compare(wanted: list[Window], found: list[list[int]]) -> list[str]:
    """Return which tokens differ that rounding can't explain."""
    return [
        f"after {len(want.prompt)} tokens: expected {want.tokens}, found {got[: len(want.tokens)]}"
        for want, got in zip(wanted, found, strict=True)
        if got[: len(want.tokens)] != want.tokens
    ]


class Captured(logging.Handler):
    """Counts the graphs that the engine says it captured."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0
        logger = logging.getLogger("pagedkv.models.decode_graphs")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Count one; whatever else is said goes to the log."""
        print(record.getMessage())
        self.count += record.levelno == logging.INFO


def run_swapped(model: LlamaForCausalLM, wanted: list[Window], params: SamplingParams) -> tuple[list[list[int]], int]:
    """Return the tokens where all need another block in one step and the pool has none, and the blocks swapped."""
    num_blocks = sum(len(want.prompt) for want in wanted) // BLOCK_SIZE + 1  # the null block
    swapped = 0

    def count(event: StepEvent) -> None:
        nonlocal swapped
        swapped += len(event.plan.swap_out)

    sizes = {"block_size": BLOCK_SIZE, "num_blocks": num_blocks, "max_model_len": (num_blocks - 1) * BLOCK_SIZE}
    with LLM(model, max_num_batched_tokens=num_blocks * BLOCK_SIZE, preemption_mode="swap", **sizes) as llm:
        llm.llm_engine.step_hooks.append(count)
        outputs = llm.generate([want.prompt for want in wanted], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], swapped


def check(device: str, lengths: tuple[int, ...] = PROMPT_LENGTHS, max_tokens: int = MAX_TOKENS, **sizes: Any) -> int:
    """Compare both, three times: with an empty cache, with all prefixes in it, and where blocks are swapped."""
    model = make_model(device, **sizes)
    prompts = make_prompts(model.config.vocab_size, lengths)
    references = [ask_transformers(model, prompt, max_tokens) for prompt in prompts]
    wanted = [window for reference in references for window in reference.windows()]
    compared = sum(len(want.tokens) for want in wanted) / (max_tokens * len(prompts))
    params = SamplingParams(temperature=0, max_tokens=WINDOW, ignore_eos=True)
    wrong, hits, captured = {}, 0, Captured()
    with LLM(model, max_num_batched_tokens=256, max_model_len=1024) as llm:
        for time in ("cold", "warm"):
            outputs = llm.generate([want.prompt for want in wanted], params, use_tqdm=False)
            wrong[time] = compare(wanted, [list(output.outputs[0].token_ids) for output in outputs])
            hits = sum(output.num_cached_tokens or 0 for output in outputs)
    crossing = [window for reference in references if (window := reference.crossing()) is not None]
    found, swapped = run_swapped(model, crossing, params)
    wrong["swapped"] = compare(crossing, found)
    write_result(
        tokens=sum(len(want.tokens) for want in wanted),
        compared=compared,
        wrong=wrong,
        cached_tokens=hits,
        swapped_blocks=swapped,
        graphs=captured.count,
    )
    for lines in wrong.values():
        print(*lines, sep="\n")
    if compared < LEAST_COMPARED:
        print(f"expected {LEAST_COMPARED:.0%} of the tokens to be sure, found {compared:.0%}")
    is_captured = captured.count > 0 or device == "cpu"
    return int(any(wrong.values()) or compared < LEAST_COMPARED or 0 in (hits, swapped) or not is_captured)


if __name__ == "__main__":
    sys.exit(check("cuda"))
