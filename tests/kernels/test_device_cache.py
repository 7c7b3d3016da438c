"""`KVCache` where operations are launched: the same steps as on the CPU, and transfers on a stream of their own."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from host_device import HostDevice
from recorder import Recorder

from pagedkv import KVCache
from pagedkv.exceptions import StateError, UnsupportedError
from pagedkv.kv_cache import append_kv
from pagedkv.kv_cache.transfers import SideStream

SIZES = (6, 4, 2, 2, 8)


def plan(**changed):
    """Return what a step plan says to a cache."""
    nothing = {
        "table_updates": np.zeros((0, 4), np.int32),
        "slot_moves": np.zeros((0, 3), np.int64),
        "swap_out": np.zeros((0, 2), np.int32),
        "swap_in": np.zeros((0, 2), np.int32),
        "swap_out_ids": np.zeros(0, np.int64),
        "swap_in_ids": np.zeros(0, np.int64),
        "copies": np.zeros((0, 2), np.int32),
    }
    return SimpleNamespace(**nothing | changed)


STEP = plan(
    table_updates=np.array([(0, 1, 2, 5), (0, 0, 0, 3), (0, 1, 2, 4)], np.int32),
    slot_moves=np.array([(0, 5, 4), (0, 6, 5)], np.int64),
    swap_out=np.array([(1, 0), (2, 1)], np.int32),
    swap_out_ids=np.array([1, 2], np.int64),
    swap_in=np.array([(1, 5)], np.int32),
    swap_in_ids=np.array([3], np.int64),
    copies=np.array([(5, 3)], np.int32),
)


def cache_after(step, layout="block", dtype="bfloat16", device="cpu"):
    """Return a cache full of numbers after a step."""
    options = {"layout": layout, "host_blocks": 2, "device": device}
    cache = KVCache(*SIZES, dtype, max_num_seqs=2, max_blocks_per_seq=3, **options)
    torch.manual_seed(0)
    cache.pool.copy_(torch.randn(cache.pool.shape))
    cache.host_pool.zero_()
    k, v = torch.randn(2, 2, 2, 8).to(cache.pool.device, cache.pool.dtype)
    cache.append_kv(1, k, v, np.array([23, -1], np.int64))
    cache.apply(step)
    return cache


def ended(cache, transfers):
    """Return which transfers have ended when all that was asked for is done."""
    if cache.pool.is_cuda:
        torch.cuda.synchronize()
    return cache.finished_transfers(np.array(transfers, np.int64)).tolist()


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_step_does_the_same_as_on_the_cpu(layout, place):
    want = cache_after(STEP, layout)
    gathered = want.gather_kv(1, np.array([3, 12], np.int32))
    launching, device = place
    with launching:
        found = cache_after(STEP, layout, device=device)
        on_device = found.gather_kv(1, np.array([3, 12], np.int32))
    assert ended(found, [1, 2, 3, 4]) == [1, 2, 3]
    assert torch.equal(found.pool.cpu(), want.pool)
    assert torch.equal(found.host_pool, want.host_pool)
    assert torch.equal(found.block_table.cpu(), want.block_table)
    assert found.block_table[0, 1, 2] == 4
    for one, other in zip(on_device, gathered, strict=True):
        assert torch.equal(one.cpu(), other)


def test_step_launches_a_kernel_for_each_thing_that_it_asks():
    device = HostDevice()
    with device.in_place_of_gpu():
        cache_after(STEP).gather_kv(1, np.array([3, 12], np.int32))
    assert [kernel for kernel, _ in device.launched] == ["append_kv", "move_kv", "copy_blocks", "gather_kv"]


class Streams:
    """Streams that do what they are asked when they are told to."""

    def __init__(self):
        self.log, self.done = [], set()

    def side(self, _device):
        return SimpleNamespace(wait_stream=lambda stream: self.log.append(f"wait for {stream}"))

    def event(self):
        event = SimpleNamespace()
        event.record = lambda stream: self.log.append("record")
        event.query = lambda: id(event) in self.done
        self.events = [*getattr(self, "events", []), event]
        return event

    @contextlib.contextmanager
    def use(self, _stream):
        self.log.append("enter")
        yield
        self.log.append("leave")


@pytest.fixture
def streams(monkeypatch):
    """Return streams in the place of torch's."""
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", streams.side)
    monkeypatch.setattr(torch.cuda, "Event", streams.event)
    monkeypatch.setattr(torch.cuda, "stream", streams.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the current stream")
    return streams


def test_transfers_run_behind_the_current_stream_and_before_their_event(streams):
    transfers = SideStream("cuda:0")
    with transfers.until(3):
        streams.log.append("copies")
    assert streams.log == ["wait for the current stream", "enter", "copies", "leave", "record"]


def test_transfers_have_ended_when_their_event_has_and_all_before_them(streams):
    transfers = SideStream("cuda:0")
    for last in (3, 5):
        with transfers.until(last):
            pass
    assert transfers.last_finished() == 0
    streams.done.add(id(streams.events[1]))
    assert transfers.last_finished() == 0
    streams.done.add(id(streams.events[0]))
    assert transfers.last_finished() == 5


def test_transfers_that_failed_to_start_have_no_end(streams):
    transfers = SideStream("cuda:0")
    with pytest.raises(ZeroDivisionError), transfers.until(3):
        raise ZeroDivisionError
    assert transfers.last_finished() == 0
    assert "record" not in streams.log


def test_slots_on_the_host_are_refused_while_a_graph_is_captured():
    with Recorder().in_place_of_gpu() as gpu:
        gpu.capturing = True
        k, cache = torch.zeros(1, 2, 8), torch.zeros(4, 2, 2, 4, 8)
        with pytest.raises(StateError, match="slot_mapping: expected memory on cpu while a graph is being captured"):
            append_kv(k, k.clone(), cache[:, 0], cache[:, 1], np.zeros(1, np.int64))
    assert gpu.launches == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda", "backend": "numpy"}, "backend: expected torch, which makes memory on cuda, found numpy"),
        ({"device": "cuda", "packed": True}, "packed: expected False on a GPU, .* found cuda"),
        ({"device": "mps"}, "device: expected cpu, cuda or cuda:N, found mps"),
        ({"device": "cuda:x"}, "device: expected cpu, cuda or cuda:N, found cuda:x"),
    ],
)
def test_place_that_a_cache_can_not_have_is_named(options, message):
    with pytest.raises(UnsupportedError, match=message):
        KVCache(6, 16, 2, 2, 8, max_num_seqs=1, max_blocks_per_seq=1, **options)
