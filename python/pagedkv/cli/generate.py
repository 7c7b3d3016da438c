"""`pagedkv generate`: prompts in, texts out."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from typing import Any

from pagedkv.cli.engine_arguments import add_engine_arguments, engine_options, positive
from pagedkv.engine import LLMEngine, RequestOutput, RequestOutputKind, SamplingParams

_EPILOG = """\
examples:
  pagedkv generate model.gguf "The capital of France is"
  pagedkv generate model.gguf --chat "Name three colours." -n 3 --temperature 0.8
  pagedkv generate model.gguf - --json < prompts.txt
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.description = "Continue prompts and print the texts as they come."
    parser.epilog = _EPILOG
    add_engine_arguments(parser)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text; '-' for one per line of standard input")
    group = parser.add_argument_group("sampling")
    group.add_argument("--chat", action="store_true", help="each prompt is what a user says")
    group.add_argument("-n", type=positive, default=1, help="samples per prompt (1)")
    group.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="most tokens per sample (128)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 draws the most probable token (0)")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends a sample; may be repeated")
    group.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object per prompt instead")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    is_streamed = not arguments.json and len(arguments.prompts) == 1 and arguments.n == 1 and arguments.prompts != ["-"]
    params = SamplingParams(
        n=arguments.n,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
        output_kind=RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY,
    )
    texts = list(_texts(arguments.prompts))
    with LLMEngine(**engine_options(arguments)) as engine:
        prompts = [_chat(engine, text) if arguments.chat else text for text in texts]
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params)
        outputs: dict[int, RequestOutput] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if is_streamed:
                    _write(output.outputs[0].text if output.outputs else "")
                outputs[int(output.request_id)] = output
    if is_streamed:
        _write("\n")
        return 0
    for number in sorted(outputs):
        _print(texts[number], outputs[number], as_json=arguments.json)
    return 0


def _texts(prompts: list[str]) -> Iterable[str]:
    for prompt in prompts:
        if prompt == "-":
            yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        else:
            yield prompt


def _chat(engine: LLMEngine, text: str) -> dict[str, Any]:
    rendered = engine.text.render_chat([{"role": "user", "content": text}])
    ids = engine.get_tokenizer()(rendered, add_special_tokens=False).input_ids
    return {"prompt": rendered, "prompt_token_ids": ids}


def _print(prompt: str, output: RequestOutput, *, as_json: bool) -> None:
    if as_json:
        fields = ("index", "text", "token_ids", "finish_reason", "stop_reason")
        samples = [dataclasses.asdict(sample) for sample in output.outputs]
        shown = [{name: sample[name] for name in fields} for sample in samples]
        line = {"prompt": prompt, "num_cached_tokens": output.num_cached_tokens, "outputs": shown}
        _write(json.dumps(line, ensure_ascii=False) + "\n")
        return
    for sample in output.outputs:
        _write(f"--- {prompt} [{sample.index}]\n{sample.text}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
