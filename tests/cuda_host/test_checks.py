"""Every check of the runtime, on a probe that is right and on probes that break one rule each."""

import re
import struct
from pathlib import Path

import pytest
import torch
from host_device import KernelFault, Memory, build_kernel, launch

PROBES = Path(__file__).parent / "probes"
CASES = re.search(r"enum Case \{(.*?)\}", (PROBES / "probe.cu").read_text(), re.DOTALL)[1].replace(",", " ").split()
THREADS, SHARED_BYTES = 64, 512

RIGHT = {
    "kBlockBarrier": lambda i: i ^ 32,
    "kWarpBarrier": lambda i: i ^ 1,
    "kShuffle": lambda i: i ^ 1,
    "kVote": lambda i: float(i >= 32),
    "kCopyAsync": lambda i: i + 100,
    "kCopyOfZeros": lambda i: 0,
    "kTwoStages": lambda i: i + 100,
    "kOwnWord": lambda i: i,
    "kBroadcast": lambda i: 100,
}
# Which of two threads comes second depends on the order; that one of them is caught does not.
RACE = r"race: (read|write) of shared offset \d+, (read|written) by .* with no barrier between, at probe\.cu:\d+"
RACE_OR_UNWRITTEN = f"{RACE}|read of shared offset .*, which nobody wrote"
IN_FLIGHT = r"read of shared offset \d+ while a cp\.async of thread \d+ is in flight"
WRONG = {
    "kNoBarrier": RACE_OR_UNWRITTEN,
    "kWeakBarrier": RACE_OR_UNWRITTEN,
    "kShuffleAsBarrier": RACE_OR_UNWRITTEN,
    "kOverwritten": RACE,
    "kOverwrittenByCopy": f"{RACE}|{IN_FLIGHT}",
    "kReadOfNothing": "read of shared offset .*, which nobody wrote",
    "kSharedBeyond": r"read of shared offset \d+, 4 bytes, beyond the 512 bytes there are",
    "kSharedMisaligned": "misaligned read of shared offset",
    "kNoWait": IN_FLIGHT,
    "kWeakWait": IN_FLIGHT,
    "kNoCommit": IN_FLIGHT,
    "kNoBarrierBehindWait": f"{RACE_OR_UNWRITTEN}|{IN_FLIGHT}",
    "kCopyLeftBehind": r"exits with 1 cp\.async never waited for",
    "kDivergentShuffle": r"no thread can go on: warp 0: lanes 0000ffff wait in a shuffle at probe\.cu:\d+; .* exited",
    "kDivergentShuffleOnTwoLines": r"divergent warp: lane \d+ reaches a shuffle at .*:\d+ while lanes \w+ wait in",
    "kShuffleOutside": "a shuffle from lane 32",
    "kDivergentBarrier": r"divergent barrier: probe\.cu:\d+ while \d+ threads wait at",
    "kBarrierAfterExit": r"a block barrier at .* after 1 threads|lanes fffffffe at a block barrier.* 00000001 exited",
    "kGlobalBeyond": r"read of 4 bytes outside every tensor \(nearest: in, offset 256\)",
    "kGlobalMisaligned": r"misaligned read of in offset \d+, 4 bytes",
    "kWriteOfInput": "write of in, which is read-only",
    "kTwoWriters": r"write of out offset 0, which block 0 thread \d+ has written",
    "kReadOfWritten": r"(read|write) of out offset \d+, which (block 0 thread \d+ has written|another thread)",
    "kConstantReadOfWritten": r"read of out offset \d+ as constant, which block 0 has written",
    "kOverflow": r"UBSan: add_overflow \(\d+, 2147483647\) at probe\.cu:\d+",
    "kBeyondLocalArray": "UBSan: out_of_bounds",
}


@pytest.fixture(scope="module")
def probe():
    return build_kernel("probe", sources=PROBES)


@pytest.fixture
def run(probe):
    """Return a function that runs a case and returns what it wrote."""
    memory = Memory()
    out = memory.place("out", torch.full((THREADS,), -1.0), writable=True)
    values = memory.place("in", torch.arange(THREADS) + 100.0)

    def run(case, blocks=1, **options):
        params = struct.pack("QQi4x", out.data_ptr(), values.data_ptr(), CASES.index(case))
        return launch(probe, params, (blocks,), THREADS, SHARED_BYTES, memory.regions, **options), out.tolist()

    return run


def test_every_case_of_the_probe_is_tested():
    assert {*RIGHT, *WRONG, "kTwoBlocks", "kBeyondLocalPointer", "kNumCases"} == set(CASES)


@pytest.mark.parametrize("schedule", ["uniform", "warp-priority"])
@pytest.mark.parametrize("case", RIGHT)
def test_a_right_protocol_passes_and_gives_its_values(run, case, schedule):
    for seed in range(5):
        _, out = run(case, seed=seed, schedule=schedule)
        assert out == [RIGHT[case](i) for i in range(THREADS)]


@pytest.mark.parametrize("schedule", ["uniform", "warp-priority"])
@pytest.mark.parametrize("case", WRONG)
def test_a_broken_rule_is_found_whatever_the_order_of_threads(run, case, schedule):
    for seed in range(5):
        with pytest.raises(KernelFault, match=WRONG[case]):
            run(case, seed=seed, schedule=schedule)


def test_a_byte_that_two_blocks_write_is_found(run):
    run("kTwoBlocks")
    with pytest.raises(KernelFault, match=r"write of out offset \d+, which block \d thread \d+ has written"):
        run("kTwoBlocks", blocks=2)


def test_a_launch_is_repeated_by_its_seed(run):
    def fault(seed):
        with pytest.raises(KernelFault) as caught:
            run("kNoBarrier", seed=seed)
        return str(caught.value)

    assert fault(3) == fault(3)
    assert len({fault(seed) for seed in range(8)}) > 1


def test_counters_tell_distinct_bytes_and_sectors_of_a_warps_access(run):
    launched, _ = run("kBroadcast", count=True)
    assert launched.traffic["in"].bytes_read == 2 * 4  # once per warp
    assert launched.traffic["in"].sectors == 2
    assert launched.traffic["out"].bytes_written == THREADS * 4
    assert launched.traffic["out"].sectors == launched.traffic["out"].least_sectors == 8


def test_a_parameter_struct_of_another_size_is_refused(probe):
    with pytest.raises(KernelFault, match="packed 8 bytes, the kernel takes 24"):
        launch(probe, bytes(8), (1,), THREADS, 0, [])
