"""Public clients of OpenAI's interface, each in its own environment: `make clients-check` builds and runs them."""

import json
import logging
import os
import subprocess
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16
NUM_REQUESTS = 20
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def environments():
    """Return the folder of the environments."""
    folder = os.environ.get("PAGEDKV_CLIENTS")
    if not folder:
        pytest.skip("needs environments of some 1.5 GB each: make clients-check")
    return Path(folder)


@pytest.fixture(scope="module")
def url(environments, serve, smollm_file):
    """Return the address of a server with SmolLM2, as `pagedkv serve` makes it."""
    with serve(smollm_file, "--max-model-len", "1024") as (_, url):
        yield url


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, smollm_file):
    """Return a folder with the tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers.AutoTokenizer.from_pretrained(smollm_file.parent, gguf_file=smollm_file.name).save_pretrained(folder)
    return folder


@pytest.fixture
def run(environments, tmp_path):
    """Return what runs a command of an environment in an empty folder, and says what it wrote where it fails."""

    def run(client, command, *words, **variables):
        binaries = environments / client / "bin"
        if not (binaries / command).exists():
            pytest.skip(f"needs {client}: make clients-check")
        # aiperf finds no folder with a tokenizer where the hub is switched off.
        ours = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONWARNINGS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        found = subprocess.run(
            [binaries / command, *words],
            cwd=tmp_path,
            env=kept | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=1200,
        )
        assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
        return found.stdout

    return run


def test_guidellm_finds_no_error(run, url, tokenizer, tmp_path, metric):
    report = tmp_path / "report.json"
    run(
        "guidellm",
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={url}"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=50,output_tokens={NUM_TOKENS}"),
        *("--output", f"kind=json,path={report}"),
        "--disable-progress",
        HF_HUB_OFFLINE="1",
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0)
    tokens = metrics["output_token_count"]["successful"]
    assert (tokens["min"], tokens["max"]) == (NUM_TOKENS, NUM_TOKENS)
    logger.info("guidellm: %s", totals)
    assert metric(url, "pagedkv:kv_blocks", state="held") == 0


def test_aiperf_finds_no_error(run, url, tokenizer, tmp_path, metric):
    run(
        "aiperf",
        "aiperf",
        "profile",
        *("-m", "tiny", "--url", url, "--endpoint-type", "chat", "--streaming", "--tokenizer", str(tokenizer)),
        *("--synthetic-input-tokens-mean", "50", "--output-tokens-mean", str(NUM_TOKENS)),
        *("--extra-inputs", "ignore_eos:true"),
        *("--request-count", str(NUM_REQUESTS), "--concurrency", "4", "--ui", "simple"),
        *("--output-artifact-dir", str(tmp_path)),
    )
    [report] = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS
    assert not found.get("error_summary")
    assert found.get("error_request_count", {"avg": 0})["avg"] == 0
    assert found["output_sequence_length"]["avg"] > 1
    logger.info("aiperf: %s", {name: found[name] for name in ("request_count", "time_to_first_token")})
    assert metric(url, "pagedkv:kv_blocks", state="held") == 0


ASK = """
import json, sys
from urllib.request import urlopen
from ultralytics import LLM
url = sys.argv[1]
llm = LLM("tiny", api="chat.completions", base_url=url + "/v1", api_key="none")
ask = "Say something about blocks of memory, and briefly about tables that say which block has which tokens."
found = llm(ask, n=3, temperature=0.8, max_tokens=8, extra_body={"top_k": 20})
print(json.dumps({"indices": [choice.index for choice in found.choices], "usage": found.usage.model_dump()}))
stream = llm(ask, n=3, temperature=0.8, max_tokens=500, stream=True, extra_body={"ignore_eos": True})
for _ in zip(range(12), stream):
    pass
state = json.load(urlopen(url + "/debug/state"))
stream.close()
print(json.dumps({"tables": [own["block_table"] for own in state["requests"][0]["sequences"]],
                  "ref_counts": state["ref_counts"]}))
"""


def test_ultralytics_gets_three_choices_over_one_prompt(run, url, tmp_path, metric):
    names = ("pagedkv:prompt_tokens_total", "pagedkv:copied_blocks_total")
    before = [metric(url, name) for name in names]
    out = run("ultralytics", "python", "-c", ASK, url, YOLO_OFFLINE="true", YOLO_CONFIG_DIR=str(tmp_path))
    answer, state = map(json.loads, out.splitlines()[-2:])
    logger.info("ultralytics: %s", answer)
    assert answer["indices"] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] <= 3 * 8
    num_prompt = answer["usage"]["prompt_tokens"]
    # The beginning is that of all conversations, which others may have left in the cache.
    assert 0 <= answer["usage"]["prompt_tokens_details"]["cached_tokens"] < num_prompt
    num_full, rest = divmod(num_prompt, BLOCK_SIZE)
    tables = state["tables"]
    assert tables[0][:num_full] == tables[1][:num_full] == tables[2][:num_full]
    assert [state["ref_counts"][block] for block in tables[0][:num_full]] == [3] * num_full
    # Both prompts count once; each further sample copies the block in which the prompt ends, if none is full there.
    after = [metric(url, name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [2 * num_prompt, 4 if rest else 0]
