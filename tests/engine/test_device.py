"""The engine beside a GPU, without one: graphs whose replay runs again what was captured, kernels on their host."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from host_device import HostDevice, missing_tools

from pagedkv import LLM, SamplingParams, Scheduler, SchedulerConfig
from pagedkv.config import CacheConfig
from pagedkv.exceptions import InvalidArgumentError, UnsupportedError
from pagedkv.models import TransformersModel
from pagedkv.models.decode_graphs import bucket_sizes
from pagedkv.models.plan_arrays import PlanArrays

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
stage = importlib.import_module("gpu_check.stages.engine")
sys.path.remove(str(BENCHMARKS))


class Graphs:
    """Captures for the CPU: a replay computes again what was captured, from what its arrays hold then."""

    def __init__(self):
        self.replays = []

    def __call__(self, run, device):
        assert device.type == "cpu"
        number = len(self.replays)
        self.replays.append(0)
        result = torch.full_like(run(), torch.nan)

        def replay():
            self.replays[number] += 1
            result.copy_(run())

        return replay, result


@pytest.fixture
def graphs():
    return Graphs()


def open_captured(model, graphs, **options):
    llm = LLM(model, **options)
    runner = llm.llm_engine._loop._runner
    runner._model.capture_decoding(llm.kv_cache, llm.llm_engine.limits.max_num_seqs, capture=graphs)
    return llm


@pytest.mark.parametrize("max_plans_in_flight", [1, 2])
def test_tokens_are_those_of_transformers_when_decoding_is_captured(random_case, graphs, max_plans_in_flight):
    with open_captured(random_case.model, graphs, max_plans_in_flight=max_plans_in_flight, max_num_seqs=5) as llm:
        outputs = llm.generate(random_case.prompts, random_case.params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == random_case.expected
    assert sum(graphs.replays) > 20


def test_samples_of_a_request_are_the_same_when_decoding_is_captured(tiny_model, graphs):
    params = SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=20, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(40))]
    found = []
    for llm in (LLM(tiny_model), open_captured(tiny_model, graphs)):
        with llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([[sample.token_ids for sample in output.outputs] for output in outputs])
    assert found[0] == found[1]
    assert graphs.replays


def test_graphs_are_captured_once_for_each_size(tiny_model, graphs):
    with open_captured(tiny_model, graphs, max_num_seqs=8) as llm:
        for num_prompts in (3, 4, 1, 3, 8, 7):
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            llm.generate([[number + 1] * 5 for number in range(num_prompts)], params, use_tqdm=False)
    assert len(graphs.replays) == 3  # of 4, 1 and 8 sequences
    assert min(graphs.replays) > 1


def test_tokens_are_the_same_when_a_model_can_not_be_captured(tiny_model, caplog):
    def refuse(run, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = []
    for llm in (LLM(tiny_model), open_captured(tiny_model, refuse)):
        with llm:
            outputs = llm.generate([[1, 2, 3], [4]], params, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    expected = "decoding is launched step by step, for it can't be captured: operation not permitted when stream is"
    assert warnings == [f"{expected} capturing"]


def test_sizes_rise_to_the_largest_batch():
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(30) == [1, 2, 4, 8, 16, 24, 30]
    assert bucket_sizes(1000)[-1] == 256


def test_arrays_within_a_copy_of_a_plan_are_those_of_the_plan():
    scheduler = Scheduler(CacheConfig(64, 4), SchedulerConfig(8, 64, 64))
    for number in range(3):
        scheduler.add_request(str(number), list(range(1, 7 + number)), max_tokens=4)
    plan = scheduler.schedule()
    copied = PlanArrays.within(plan, torch.from_dlpack(plan.buffer).clone())
    own = PlanArrays.of(plan, torch.device("cpu"))
    for name in ("token_ids", "positions", "input_from", "sample_rows", "slot_mapping"):
        assert torch.equal(getattr(copied, name), getattr(own, name))
        assert getattr(own, name).tolist() == getattr(plan, name).tolist()
        assert getattr(copied, name).data_ptr() != getattr(own, name).data_ptr()


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("mps", UnsupportedError, "device: expected cpu, cuda or cuda:N, found mps"),
        ("cuda:x", UnsupportedError, "device: expected cpu, cuda or cuda:N, found cuda:x"),
        ("cuda:99", InvalidArgumentError, r"device: expected one of the \d+ GPUs that torch finds, found cuda:99"),
    ],
)
def test_device_that_is_not_there_is_refused_by_name(tiny_model, device, error, message):
    with pytest.raises(error, match=message):
        LLM(tiny_model, device=device)


def test_device_of_a_given_model_may_be_named(tiny_model):
    with LLM(tiny_model, device="cpu") as llm:
        assert llm.kv_cache.device == "cpu"


PROMPTS = (1, 8, 33, 40)  # two of them fill a block within twelve tokens
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}


class Device(HostDevice):
    """Notes which variants are launched."""

    def __init__(self):
        super().__init__()
        self.variants = set()

    def launch(self, asked):
        self.variants.add(asked.variant)
        super().launch(asked)


@pytest.fixture
def device():
    if reason := missing_tools():
        pytest.skip(reason)
    device = Device()
    with device.in_place_of_gpu():
        yield device


def test_tokens_are_those_of_transformers_when_kernels_compute_them_that_were_loaded_before(device):
    assert TransformersModel(stage.make_model("cpu", **SIZES)).load_kernels() == len(device.loaded)
    assert stage.check("cpu", PROMPTS, 12, **SIZES) == 0
    assert {"append_kv", "paged_decode", "paged_prefill"} <= {variant.kernel for variant in device.variants}
    assert device.variants <= set(device.loaded)


@pytest.mark.usefixtures("device")
def test_tokens_are_those_of_transformers_when_kernels_compute_decoding_that_is_captured(graphs, monkeypatch):
    monkeypatch.setattr(stage, "LLM", lambda model, **options: open_captured(model, graphs, max_num_seqs=6, **options))
    assert stage.check("cpu", PROMPTS, 12, **SIZES) == 0
    assert sum(graphs.replays) > len(graphs.replays) > 0


@pytest.mark.usefixtures("device")
def test_model_whose_types_have_no_kernel_is_refused_by_name():
    model = stage.make_model("cpu", **SIZES)
    with pytest.raises(TypeError, match="k_cache, v_cache: expected bfloat16 or float8_e4m3fn or float8_e5m2 beside"):
        TransformersModel(model, kv_cache_dtype="float16").load_kernels()
