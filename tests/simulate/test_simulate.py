"""Simulations through Python."""

import threading
import time

import numpy as np
import pytest

import pagedkv
from pagedkv.simulate import CostModel, Workload, simulate

SYSTEMS = ["pagedkv", "vllm", "orca_max", "orca_pow2", "orca_oracle", "fastertransformer"]
CACHE = pagedkv.CacheConfig(984, enable_prefix_caching=False)
LIMITS = pagedkv.SchedulerConfig(256, 2560, 2048, watermark=0.01)


def outcome(simulation):
    """Return all that a simulation says, as one value that can be compared."""
    arrays = (simulation.first_token, simulation.finish, simulation.cached_tokens)
    return [array.tobytes() for array in arrays] + [simulation.num_steps, simulation.mean_requests]


@pytest.mark.parametrize("system", SYSTEMS)
def test_simulate_ends_every_request(system):
    workload = Workload.sharegpt(60, 1.0)
    simulation = simulate(workload, system, CACHE, LIMITS)
    assert np.isfinite(simulation.finish).all()
    assert (simulation.first_token <= simulation.finish).all()
    assert (simulation.first_token > workload.arrivals).all()
    assert simulation.seconds == pytest.approx(simulation.finish.max())


@pytest.mark.parametrize("system", SYSTEMS)
def test_simulate_repeats_itself_byte_by_byte(system):
    one, other = (simulate(Workload.sharegpt(60, 2.0, seed=4), system, CACHE, LIMITS) for _ in range(2))
    assert outcome(one) == outcome(other)


def test_simulate_runs_more_requests_at_once_with_paging():
    workload = Workload.sharegpt(400, 4.0)
    batches = [simulate(workload, name, CACHE, LIMITS).mean_requests for name in ("orca_max", "orca_oracle", "pagedkv")]
    assert batches == sorted(batches)
    assert batches[2] > 3 * batches[0]


def test_simulate_lets_other_threads_run():
    """The interpreter is free while a simulation runs, which takes much longer than a turn of the interpreter."""
    workload, ticks = Workload.sharegpt(8000, 2.0), []
    ended = threading.Event()

    def count():
        while not ended.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    begun = time.perf_counter()
    simulate(workload, "pagedkv", CACHE, LIMITS)
    done = time.perf_counter()
    ended.set()
    thread.join()
    assert sum(begun < tick < done for tick in ticks) > 3


def test_simulate_stops_planning_at_the_end_that_is_asked_for():
    simulation = simulate(Workload.sharegpt(200, 4.0), "vllm", CACHE, LIMITS, until=10.0)
    assert simulation.seconds < 11
    assert np.isnan(simulation.finish).any()


def test_simulate_counts_hits_of_a_shared_prefix():
    workload = Workload.translation(50, 5.0).with_shared_prefix(341)
    cached = pagedkv.CacheConfig(984)
    simulation = simulate(workload, "pagedkv", cached, LIMITS)
    # 21 whole blocks of the prefix, for all but those that came before the first was computed.
    assert np.median(simulation.cached_tokens) == 336
    assert (simulate(workload, "pagedkv", CACHE, LIMITS).cached_tokens == 0).all()


def test_simulate_saves_blocks_where_samples_share():
    load = Workload.alpaca(300, 10.0)
    ratios = [
        simulate(load.with_sampling(4, beam=beam), "pagedkv", CACHE, LIMITS).sharing_ratio for beam in (False, True)
    ]
    assert 1.0 < ratios[0] < ratios[1]


def test_simulate_takes_longer_with_a_slower_machine():
    workload = Workload.sharegpt(50, 0.5)
    slow = CostModel.fitted(base=0.046)
    latencies = [simulate(workload, "pagedkv", CACHE, LIMITS, cost).finish.sum() for cost in (None, slow)]
    assert latencies[0] < latencies[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system": "orca"}, 'system: expected one of pagedkv, vllm, .*, found "orca"'),
        ({"preemption": "never"}, "preemption: expected one of by_samples, recompute, swap"),
        ({"beam_turnover": 1.5}, "beam_turnover: expected a chance from 0 to 1, found 1.5"),
        ({"batch_size": 0, "system": "fastertransformer"}, "batch_size: expected at least 1, found 0"),
        ({"window": (5.0, 1.0)}, "window: expected two ascending seconds"),
        ({"until": 0.0}, "until: expected seconds above 0"),
        ({"swap_bandwidth": 0.0}, "swap_bandwidth: expected bytes a second, above 0"),
        ({"workload": Workload.sharegpt(0, 1.0)}, "workload: expected at least one request, found none"),
    ],
)
def test_simulate_names_the_argument_that_it_refuses(change, message):
    arguments = {"workload": Workload.sharegpt(3, 1.0), "system": "vllm"} | change
    with pytest.raises(ValueError, match=message):
        simulate(cache_config=CACHE, scheduler_config=LIMITS, **arguments)


@pytest.mark.parametrize("system", SYSTEMS)
def test_simulate_names_the_request_that_is_longer_than_the_model(system):
    workload = Workload.from_lengths([10, 2000], [10, 100], [0.0, 1.0])
    expected = r"request 1: prompt_tokens \+ output_tokens: expected at most 2048 \(max_model_len\), found 2100"
    with pytest.raises(pagedkv.exceptions.InvalidArgumentError, match=expected):
        simulate(workload, system, CACHE, LIMITS)


def test_simulate_names_the_line_of_a_request_that_is_longer_than_the_pool(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,output_tokens\n10,10\n900,100\n")
    workload = Workload.read_table(path)
    with pytest.raises(ValueError, match=r"request 1 \(line 3\): prompt_tokens \+ output_tokens"):
        simulate(workload, "vllm", pagedkv.CacheConfig(40), LIMITS)
    with pytest.raises(ValueError, match=r"request 1 \(line 3\): prompt_tokens \+ output_tokens"):
        simulate(workload, "pagedkv", pagedkv.CacheConfig(40), LIMITS)


def test_cost_model_reads_a_profile_of_measured_steps(tmp_path):
    path = tmp_path / "steps.csv"
    rows = [(1, 100, 0), (8, 900, 64), (32, 20_000, 0), (32, 9000, 512), (4, 10, 128)]
    known = CostModel.fitted()
    lines = [f"{seqs},{context},{prompt},{known.step_seconds(seqs, context, prompt)}" for seqs, context, prompt in rows]
    path.write_text("\n".join(["num_seqs,context_tokens,prompt_tokens,seconds", *lines]) + "\n")
    assert CostModel.profile(path).step_seconds(20, 5000, 100) == pytest.approx(known.step_seconds(20, 5000, 100))


def test_cost_model_names_line_and_field_of_a_profile_that_is_wrong(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("num_seqs,context_tokens,prompt_tokens,seconds\n1,2,3,soon\n")
    with pytest.raises(ValueError, match='line 2: seconds is "soon", expected a finite number of at least 0'):
        CostModel.profile(path)


def test_roofline_refuses_an_efficiency_above_one():
    with pytest.raises(ValueError, match="bandwidth_efficiency: expected a share above 0, at most 1, found 2"):
        CostModel.roofline(bandwidth_efficiency=2.0)
