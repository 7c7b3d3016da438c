"""Where models and tokenizers come from."""

from pathlib import Path

import pytest
import torch

from pagedkv import LLM, SamplingParams
from pagedkv.exceptions import InvalidArgumentError
from pagedkv.models import dtypes, load_model

ROOT = Path(__file__).resolve().parents[2]
PARAMS = SamplingParams(temperature=0, max_tokens=4)


def test_llm_loads_a_folder(tiny_model, letters, tmp_path):
    tiny_model.save_pretrained(tmp_path)
    with LLM(tiny_model) as given, LLM(tmp_path, letters) as loaded:
        expected = given.generate([5, 6], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        assert loaded.generate([5, 6], PARAMS, use_tqdm=False)[0].outputs[0].token_ids == expected
        assert loaded.get_tokenizer() is letters


def test_load_model_loads_a_gguf_file_with_its_tokenizer(smollm):
    model, tokenizer = smollm
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.decode(tokenizer("The capital of France is").input_ids) == "The capital of France is"


def test_load_model_loads_in_the_dtype_that_it_is_asked_for(tiny_model, tmp_path):
    tiny_model.save_pretrained(tmp_path)
    assert load_model(str(tmp_path), object(), "bfloat16")[0].dtype == torch.bfloat16


def test_load_model_takes_a_model_as_it_is(tiny_model):
    assert load_model(tiny_model, None, torch.float32) == (tiny_model, None)


def test_load_model_refuses_another_dtype_than_that_of_a_given_model(tiny_model):
    with pytest.raises(
        ValueError, match=r"^dtype: expected that of the given model, torch.float32, found torch.float16"
    ):
        load_model(tiny_model, None, "float16")


def test_load_model_refuses_an_unknown_dtype(tiny_model):
    with pytest.raises(ValueError, match="^dtype: expected one of auto, float32, float16, bfloat16, found 'int8'"):
        load_model(tiny_model, None, "int8")


def test_load_model_refuses_a_gguf_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="^model: expected a GGUF file, found none at .*absent.gguf"):
        load_model(str(tmp_path / "absent.gguf"))


def test_load_model_refuses_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="^model: expected a folder or a GGUF file, found none at "):
        load_model(tmp_path / "absent")


@pytest.mark.parametrize("content", [b"", b"no", b"GGUF\3\0\0\0" + b"\xff" * 40], ids=["empty", "other", "cut"])
def test_llm_names_the_model_that_is_a_broken_gguf_file(tmp_path, content):
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match="^model: expected a GGUF file at .*broken.gguf, found "):
        LLM(tmp_path / "broken.gguf")


@pytest.mark.parametrize("name", ["./absent", "/absent/folder", "~/absent-folder", "README.md"])
def test_llm_names_the_model_that_is_a_path_to_nowhere(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(InvalidArgumentError, match="^model: expected a folder or a GGUF file, found none at "):
        LLM(name)


@pytest.mark.parametrize("model", [5, None])
def test_llm_names_the_model_that_is_none(model):
    with pytest.raises(InvalidArgumentError, match=f"^model: expected a model of transformers, .* found {model}$"):
        LLM(model)


def test_llm_names_the_argument_that_transformers_can_not_load(tiny_model, letters, tmp_path):
    with pytest.raises(InvalidArgumentError, match="^model: expected what transformers can load, found no/such-model"):
        LLM("no/such-model", letters)
    with pytest.raises(InvalidArgumentError, match="^model: expected what transformers can load, found .*"):
        LLM(tmp_path, letters)
    tiny_model.save_pretrained(tmp_path)
    with pytest.raises(InvalidArgumentError, match="^tokenizer: expected what transformers can load, found .*"):
        LLM(tmp_path)


@pytest.mark.parametrize(("has_product", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_fastest_dtype_is_that_which_the_cpu_multiplies(monkeypatch, caplog, has_product, expected):
    monkeypatch.setattr(dtypes, "has_bf16_product", lambda: has_product)
    with caplog.at_level("INFO", logger="pagedkv"):
        assert dtypes.fastest_dtype() is expected
    assert str(expected).removeprefix("torch.") in caplog.text
