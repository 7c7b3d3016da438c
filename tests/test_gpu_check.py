"""`make gpu-check` as far as it runs without a GPU: its stages, its record, what is packed, and what it compares."""

import importlib
import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from host_device import HostDevice, missing_tools

from pagedkv.kernels import nvrtc
from pagedkv.kernels.compile import kernel_names
from pagedkv.kernels.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT / "benchmarks"))
machine, pack, plan, record, runner = (
    importlib.import_module(f"gpu_check.{name}") for name in ("machine", "pack", "plan", "record", "runner")
)
command_line = importlib.import_module("gpu_check.__main__")
kernels_stage, sanitizer, shapes, small_shapes, suite, timings, vectors = (
    importlib.import_module(f"gpu_check.stages.{name}")
    for name in ("kernels", "sanitizer", "shapes", "small_shapes", "suite", "timings", "vectors")
)
sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


# Stages


@pytest.fixture
def run_stages(tmp_path):
    """Return a function that runs stages, each given as a name, a Python program, and more fields of a stage."""

    def run_stages(*stages, seconds=30.0):
        made = []
        for name, program, *more in stages:
            fields = {"seconds": 20.0, "needs": ()} | (more[0] if more else {})
            command = (sys.executable, "-c", textwrap.dedent(program))
            made.append(runner.Stage(name, command, **fields))
        kept = []
        runner.run_stages(
            made,
            seconds=seconds,
            folder=tmp_path,
            log=tmp_path / "log",
            environment=dict(os.environ, PYTHONPATH=str(ROOT / "benchmarks")),
            after_each=lambda done: kept.append([dict(outcome) for outcome in done]),
        )
        return kept

    return run_stages


def test_stage_that_fails_is_recorded_and_the_next_one_runs(run_stages):
    failing = "import sys; print('what went wrong'); sys.exit(5)"
    *_, last = run_stages(("first", failing), ("second", "pass"))
    assert [outcome["status"] for outcome in last] == ["failed", "passed"]
    assert last[0]["exit"] == 5
    assert last[0]["tail"] == ["what went wrong"]


def test_stage_that_is_refused_is_no_failure(run_stages):
    *_, (outcome,) = run_stages(("refused", f"raise SystemExit({runner.NOT_TO_BE_HAD})"))
    assert outcome["status"] == "refused"
    assert outcome["status"] in runner.GOOD


def test_stage_that_crashes_is_a_failure(run_stages):
    *_, (outcome,) = run_stages(("crash", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert (outcome["status"], outcome["exit"]) == ("failed", -11)


def test_stage_that_outlasts_its_budget_is_killed_with_what_it_started(run_stages, tmp_path):
    program = f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
        time.sleep(60)
    """
    *_, last = run_stages(("slow", program, {"seconds": 3.0}), ("next", "pass"))
    assert [outcome["status"] for outcome in last] == ["timed out", "passed"]
    assert last[0]["seconds"] < 15
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_stage_without_what_it_needs_is_skipped_and_says_so(run_stages):
    *_, last = run_stages(("first", "raise SystemExit(1)"), ("second", "pass", {"needs": ("first",)}))
    assert (last[1]["status"], last[1]["reason"]) == ("skipped", "needs first")


def test_stages_behind_the_end_of_all_time_are_skipped(run_stages):
    *_, last = run_stages(("first", "import time; time.sleep(30)"), ("second", "pass"), seconds=2.0)
    assert [outcome["status"] for outcome in last] == ["timed out", "skipped"]
    assert last[1]["reason"] == "no time was left"


def test_stage_hands_over_results_and_environment(run_stages):
    first = "from gpu_check.runner import write_result; write_result(count=3, environment={'FROM_FIRST': 'x'})"
    *_, last = run_stages(("first", first), ("second", "import os; raise SystemExit(os.environ['FROM_FIRST'] != 'x')"))
    assert last[0]["results"]["count"] == 3
    assert last[1]["status"] == "passed"


def test_stage_whose_result_is_broken_fails(run_stages):
    program = "import os; open(os.environ['GPU_CHECK_RESULT'], 'w').write('{')"
    *_, (outcome,) = run_stages(("broken", program))
    assert outcome["status"] == "failed"
    assert "no JSON" in outcome["reason"]


def test_results_are_kept_after_each_stage(run_stages):
    kept = run_stages(("first", "pass"), ("second", "pass"))
    assert [[outcome["stage"] for outcome in done] for done in kept] == [["first"], ["first", "second"]]


def test_every_stage_of_the_plan_is_a_program_within_the_time_of_all(tmp_path):
    stages = plan.make_plan(tmp_path)
    for stage in stages:
        assert stage.command[:2] == (sys.executable, "-m")
        assert (ROOT / "benchmarks" / Path(*stage.command[2].split("."))).with_suffix(".py").is_file()
        assert stage.seconds < plan.SECONDS == 480
    own = [stage.name for stage in stages].index(plan.TIMINGS) + 1
    assert sum(stage.seconds for stage in stages[:own]) <= plan.SECONDS


# The record


def line(what, **fields):
    return {"what": what, "unit": "x", "ours": 1.0, "ratio": None, "of_limit": None, "peer_name": None} | fields


GOOD_LINES = [
    line("decode_bf16_32x4096", ours=3900.0, of_limit=0.91, limit_name="device copy"),
    line("decode_fp8_over_bf16", ours=1.8),
    line("decode_bf16_1x8192", ours=19.0),
    line("prefill_bf16_4x4096", ours=340.0),
]


def outcome_of(stage, status="passed", lines=()):
    results = {"lines": list(lines)} if lines else None
    return {"stage": stage, "status": status, "seconds": 1.0, "results": results, "tail": [], "reason": None}


def record_of(*outcomes, planned=("kernels", "timings")):
    about = {"commit": "abc", "started": "2026-11-30T00:00:00+00:00", "seconds": 2.0, "machine": {"device": "none"}}
    return record.make_record(outcomes, **about, planned=planned)


def test_record_has_its_fields_and_is_json(tmp_path):
    made = record_of(outcome_of("kernels"), outcome_of("timings", lines=GOOD_LINES))
    record.write_record(tmp_path / "record.json", made)
    read = json.loads((tmp_path / "record.json").read_text())
    assert read == made
    assert read.keys() == record.FIELDS
    assert [entry["what"] for entry in read["lines"]] == [entry["what"] for entry in GOOD_LINES]
    assert list(tmp_path.iterdir()) == [tmp_path / "record.json"]


def test_record_meets_all_marks():
    made = record_of(outcome_of("kernels"), outcome_of("timings", lines=GOOD_LINES))
    assert [mark["met"] for mark in made["marks"]] == [True] * 4
    assert record.exit_status(made) == 0
    assert "passed" in record.summary(made)


MISSED = [(0, "of_limit", 0.89), (1, "ours", 1.6), (2, "ours", 20.5), (3, "ours", 320.0)]


@pytest.mark.parametrize(("number", "field", "value"), MISSED)
def test_mark_that_is_missed_gives_a_status_of_its_own(number, field, value):
    lines = [dict(entry) for entry in GOOD_LINES]
    lines[number][field] = value
    made = record_of(outcome_of("kernels"), outcome_of("timings", lines=lines))
    assert [mark["met"] for mark in made["marks"]].count(False) == 1
    assert record.exit_status(made) == 2
    assert "MISSED" in record.summary(made)


def test_marks_of_what_was_not_measured_are_neither_met_nor_missed():
    made = record_of(outcome_of("kernels"), outcome_of("timings", "failed"))
    assert {mark["met"] for mark in made["marks"]} == {None}
    assert record.exit_status(made) == 1
    assert "not measured" in record.summary(made)


@pytest.mark.parametrize("status", ["failed", "timed out", "skipped"])
def test_record_has_not_passed_when_a_stage_has_not(status):
    made = record_of(outcome_of("kernels"), outcome_of("timings", status, GOOD_LINES))
    assert (made["passed"], record.exit_status(made)) == (False, 1)


def test_record_has_not_passed_when_a_stage_never_ran():
    assert record_of(outcome_of("kernels"))["passed"] is False


def test_record_has_passed_when_a_runtime_refused_a_tool():
    made = record_of(outcome_of("kernels"), outcome_of("memcheck", "refused"), planned=("kernels", "memcheck"))
    assert made["passed"] is True


# Without a GPU, and with a whole check


def test_check_without_a_gpu_names_what_is_missing_and_ends_with_3(tmp_path):
    try:
        machine.find_gpu()
    except machine.NoGpuError as error:
        missing = str(error)
    else:
        pytest.skip("this machine has a GPU")
    words = [sys.executable, "-m", "gpu_check", "--out", str(tmp_path / "out")]
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "benchmarks"))
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == f"gpu-check needs an NVIDIA GPU: {missing}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def packed(tmp_path):
    """Return a folder as `gpu-pack` leaves it, with a wheel that has one module."""
    folder = tmp_path / "packed"
    (folder / "wheel").mkdir(parents=True)
    with zipfile.ZipFile(folder / "wheel" / "a.whl", "w") as wheel:
        wheel.writestr("found_in_wheel.py", "VALUE = 7\n")
    about = {"wheel": "a.whl", "nvrtc": "13.2, 1 bytes", "commit": "abc", "archs": [], "kernels": 0}
    (folder / "pack.json").write_text(json.dumps(about))
    return folder


@pytest.fixture
def check(tmp_path, packed, monkeypatch):
    """Return a function that runs a whole check of programs on a made-up GPU; gives its status and its record."""
    gpu = {"device": "made up", "compute_capability": "9.0", "driver": "none"}
    monkeypatch.setattr(command_line, "find_gpu", lambda: gpu)

    def check(*programs):
        stages = [
            runner.Stage(f"stage{number}", (sys.executable, "-c", program), 20.0)
            for number, program in enumerate(programs)
        ]
        monkeypatch.setattr(plan, "make_plan", lambda _: stages)
        out = tmp_path / "out"
        status = command_line.main(["--out", str(out), "--pack", str(packed)])
        return status, json.loads((out / command_line.RECORD).read_text())

    return check


def test_check_runs_stages_with_the_wheels_package_and_the_packed_kernels(check, packed):
    program = f"""
import os, found_in_wheel
assert found_in_wheel.VALUE == 7
assert os.environ["PAGEDKV_CACHE_DIR"] == {str(packed / "cache")!r}
assert os.environ["PAGEDKV_NVRTC_VERSION"] == "13.2, 1 bytes"
"""
    status, made = check(program)
    assert (status, made["stages"][0]["tail"]) == (0, [])
    assert made["machine"]["device"] == "made up"
    assert made["commit"] == "abc"


def test_check_with_a_failing_stage_ends_with_1_and_keeps_all_outcomes(check):
    status, made = check("pass", "raise RuntimeError('planted')", "pass")
    assert status == 1
    assert [outcome["status"] for outcome in made["stages"]] == ["passed", "failed", "passed"]
    assert made["stages"][1]["tail"][-1] == "RuntimeError: planted"


def test_check_says_what_is_not_packed(tmp_path):
    with pytest.raises(command_line.NotPackedError, match="expected what `make gpu-pack` makes"):
        command_line.unpack(tmp_path, tmp_path / "site")


# What is packed


def test_pack_that_is_too_large_is_refused_with_its_size():
    said = pack.check_size(20 << 20, 43 << 20)
    assert said == "43.0 MiB packed and 20.0 MiB of working tree: 63.0 of 64 MiB"
    with pytest.raises(pack.TooLargeError, match=r"at most 64 MiB to travel, found 45\.0 MiB packed and 20\.0 MiB"):
        pack.check_size(20 << 20, 45 << 20)


@pytest.mark.parametrize("edited", [None, "include/ptx.cuh"])
def test_wheel_with_other_cuda_sources_is_refused(tmp_path, edited):
    sources = ROOT / "cuda"
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for path in sources.rglob("*.cu*"):
            name = path.relative_to(sources).as_posix()
            wheel.writestr(f"pagedkv/cuda/{name}", path.read_text() + "// edited" * (name == edited))
    if edited is None:
        pack.check_wheel(tmp_path / "a.whl")
    else:
        with pytest.raises(pack.OtherSourcesError, match=f"a.whl: expected the CUDA sources of .*: {edited}"):
            pack.check_wheel(tmp_path / "a.whl")


def test_working_tree_leaves_room_for_a_pack():
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout")
    assert 0 < pack.bytes_of_tree() < 32 << 20


def test_pack_has_the_chosen_kernels_the_probe_and_nothing_of_other_sources(tmp_path, monkeypatch):
    try:
        nvrtc.load_compiler()
    except nvrtc.NvrtcNotFoundError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", "")  # which packing sets
    (tmp_path / "cache" / "kernels").mkdir(parents=True)
    (tmp_path / "cache" / "kernels" / "append_kv-sm_90a-old.cubin").write_bytes(b"old")
    chosen = [variant for variant in VARIANTS if variant.kernel == "copy_blocks"]
    count = pack.compile_kernels(tmp_path, ("sm_90a",), 1, chosen)
    files = [path.name for path in tmp_path.rglob("*.cubin")]
    assert count == len(chosen)
    assert sorted(name.split("-")[0] for name in files) == ["copy_blocks"] * count + ["vocabulary"]
    assert "append_kv-sm_90a-old.cubin" not in files
    monkeypatch.setenv("PAGEDKV_NVRTC_VERSION", nvrtc.load_compiler().version)
    found = {variant.name for variant in VARIANTS} - set(kernels_stage.missing_variants("sm_90a"))
    assert found == {variant.name for variant in chosen}


# What stages compare


@pytest.fixture
def folder_of_tests(tmp_path):
    """Return a function that writes a test file."""

    def write(text):
        (tmp_path / "test_planted.py").write_text(textwrap.dedent(text))
        return (str(tmp_path),)

    return write


@pytest.mark.parametrize(
    ("body", "status", "counts"),
    [
        ("assert True", 0, {"passed": 1, "failed": 0, "skipped": 0}),
        ("assert False", 1, {"passed": 0, "failed": 1, "skipped": 0}),
        ("pytest.skip('no GPU')", 1, {"passed": 0, "failed": 0, "skipped": 1}),
    ],
    ids=["passing", "failing", "skipped"],
)
def test_suite_fails_when_a_test_fails_or_none_runs(folder_of_tests, tmp_path, monkeypatch, body, status, counts):
    tests = folder_of_tests(f"""
        import pytest

        @pytest.mark.gpu
        def test_one():
            {body}

        def test_that_is_not_chosen():
            assert False
    """)
    monkeypatch.setenv(runner.RESULT_VARIABLE, str(tmp_path / "result.json"))
    assert suite.run(tests) == status
    found = json.loads((tmp_path / "result.json").read_text())
    assert {name: found[name] for name in counts} == counts


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (0, "========= ERROR SUMMARY: 0 errors", 0),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed", 0),
        (99, "========= ERROR SUMMARY: 3 errors", 1),
        (99, "========= Failed to initialize NVML\n========= ERROR SUMMARY: 1 error", 1),
        (1, "Traceback", 1),
        (0, "nothing was run", 1),
        (1, "========= Error: Device not supported", runner.NOT_TO_BE_HAD),
    ],
)
def test_sanitizer_is_judged_by_its_status_and_its_summary(status, output, expected):
    assert sanitizer.judge(status, output)[0] == expected


def test_small_shapes_run_every_operation():
    assert small_shapes.main("cpu") == 0


@pytest.fixture
def host():
    """Put the host that runs kernels in the place of a GPU."""
    if reason := missing_tools():
        pytest.skip(reason)
    device = HostDevice()
    with device.in_place_of_gpu():
        yield device


def test_small_shapes_launch_every_kernel(host):
    assert small_shapes.main("cpu", (64,)) == 0
    assert {kernel for kernel, _ in host.launched} == set(kernel_names())


SMALL = {
    "decode": shapes.Shape(3, 50, num_q_heads=4, num_kv_heads=2, head_dim=32, num_layers=2),
    "prefill": shapes.Shape(2, 40, num_queries=33, num_q_heads=4, num_kv_heads=2, head_dim=32, num_layers=2),
    "fp8": shapes.Shape(2, 40, num_q_heads=4, num_kv_heads=2, head_dim=32, dtype="float8_e4m3fn", num_layers=2),
}


@pytest.mark.parametrize("name", SMALL)
def test_timed_shape_computes_what_torch_does(name):
    batch = shapes.PagedBatch(SMALL[name], "cpu")
    assert batch.error(1) < 0.02


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("host")
def test_kernels_compute_what_torch_does_of_a_timed_shape(name):
    assert shapes.PagedBatch(SMALL[name], "cpu").error(1) < 0.02


def test_timed_shape_that_is_wrong_is_found():
    batch = shapes.PagedBatch(SMALL["decode"], "cpu")
    batch.table[-1, 0] = batch.table[0, 0]  # what torch looks at, but not the plan
    assert batch.error(1) > 0.02


@pytest.fixture
def time_stage(monkeypatch, tmp_path):
    """Run the stage of timings with other functions in it; return its exit status and what it wrote."""

    def run(**functions):
        defaults = {"copy_rate": lambda: [4e12], "time_ours": lambda _: [1e-3], "time_torch": lambda _: [2e-3]}
        for name, function in (defaults | functions).items():
            monkeypatch.setattr(timings, name, function)
        monkeypatch.setenv(runner.RESULT_VARIABLE, str(tmp_path / "result.json"))
        status = timings.main()
        found = json.loads((tmp_path / "result.json").read_text())["lines"]
        return status, {line["what"]: line for line in found}

    return run


def test_timings_are_beside_torch_and_the_copy(time_stage):
    status, found = time_stage()
    assert status == 0
    ratios = {what: line["ratio"] for what, line in found.items() if line["ratio"] is not None}
    beside = ("decode_bf16_32x4096", "decode_bf16_1x8192", "prefill_bf16_4x4096")
    assert ratios == pytest.approx(dict.fromkeys(beside, 2))
    assert found["decode_bf16_32x4096"]["of_limit"] == pytest.approx(timings.DECODE.bytes_moved / 1e-3 / 4e12)


def test_timings_keep_our_figures_when_torch_fails(time_stage):
    def fail(shape):
        raise RuntimeError("out of memory")

    status, found = time_stage(time_torch=fail)
    assert status == 1
    assert len(found) == 6
    assert all(line["ours"] is not None for line in found.values())
    assert found["decode_bf16_1x8192"]["peer_refused"] == "RuntimeError: out of memory"


def test_timings_go_on_when_one_result_is_wrong(time_stage):
    def ours(shape):
        if shape == timings.DECODE:
            raise timings.WrongResultError("off")
        return [1e-3]

    status, found = time_stage(time_ours=ours)
    assert status == 1
    assert found["decode_bf16_32x4096"]["refused"] == "WrongResultError: off"
    assert found["prefill_bf16_4x4096"]["ratio"] == pytest.approx(2)
    assert "decode_fp8_over_bf16" not in found


def test_timed_shapes_count_bytes_and_operations():
    shape = shapes.Shape(32, 4096)
    assert shape.kv_bytes == 32 * 4096 * 8 * 128 * 2 * 2 >= 500e6
    assert shape.bytes_moved - shape.kv_bytes == 2 * 32 * 32 * 128 * 2
    assert shapes.Shape(1, 3, num_queries=2, num_q_heads=1, head_dim=8).flops == 4 * 8 * (2 + 3)


def test_probes_parameters_lie_as_the_kernel_has_them():
    offsets = {name: vectors.PARAMS.fields[name][1] for name in vectors.PARAMS.names}
    assert offsets == {"out": 0, "in": 8, "function": 16}
    assert vectors.PARAMS.itemsize == 24
    assert vectors.PARAMS["function"] == np.int32
