"""`pagedkv serve` as a process: where it listens, and how it ends."""

import signal

import httpx2
import pytest

pytest.importorskip("uvicorn")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a small model of random weights."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=300, max_position_embeddings=512, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    words = {f"<{number}>": number for number in range(256)} | {"<unk>": 256}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def test_serve_listens_on_this_machine_alone_and_ends_when_its_answers_have(serve, folder):
    body = {"model": "tiny", "prompt": "<1> <2>", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with serve(folder) as (process, url):
        assert url.startswith("http://127.0.0.1:")
        assert httpx2.get(url + "/health", timeout=60).status_code == 200
        with httpx2.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in events[-2]
        # uvicorn hands the signal on when everything has ended.
        assert process.wait(timeout=60) == -signal.SIGTERM
