"""Many streams for a while, some cut off in the middle, some garbage: no failure, and nothing is left behind."""

import asyncio
import itertools
import json
import logging
import os
import random
import time
from collections import Counter
from pathlib import Path

import httpx2
import pytest

GARBAGE = [b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "x", "n": -1}', b'{"prompt": "x", "temperature": "hot"}']
PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


class Soak:
    """Clients that ask without pause; every tenth answer is cut off, every twentieth request is garbage."""

    def __init__(self, server, prompts, max_tokens, seconds):
        self.server = server
        self.prompts = prompts
        self.max_tokens = max_tokens
        self.start = time.monotonic()
        self.end = self.start + seconds
        self.numbers = itertools.count()
        self.blocks_at_the_start = server.scheduler.num_blocks_by_state
        self.statuses = Counter()
        self.outcomes = Counter()
        self.memory = []

    async def client(self, http):
        while time.monotonic() < self.end:
            number = next(self.numbers)
            if number % 20 == 19:
                await self.send_garbage(http, number)
            else:
                await self.read_stream(http, number, is_cut=number % 10 == 4)

    async def send_garbage(self, http, number):
        headers = {"Content-Type": "application/json"}
        answer = await http.post("/v1/completions", content=GARBAGE[number // 20 % len(GARBAGE)], headers=headers)
        self.statuses[answer.status_code] += 1
        assert answer.status_code == 400
        self.outcomes["garbage"] += 1

    async def read_stream(self, http, number, *, is_cut):
        prompt = self.prompts[number % len(self.prompts)]
        body = {
            "prompt": prompt,
            "max_tokens": self.max_tokens,
            "stream": True,
            "ignore_eos": True,
            "n": 1 + number % 3,
        }
        left = random.Random(number).randrange(1, self.max_tokens)
        last = ""
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            self.statuses[answer.status_code] += 1
            if answer.status_code != 200:
                await answer.aread()
                self.outcomes[answer.json()["error"]["type"]] += 1
                await asyncio.sleep(0.05)
                return
            async for line in answer.aiter_lines():
                last = line or last
                left -= 1
                if is_cut and left == 0:
                    self.outcomes["cut"] += 1
                    return
        assert last == "data: [DONE]"
        self.outcomes["whole"] += 1

    async def watch_memory(self):
        while time.monotonic() < self.end:
            self.memory.append((time.monotonic() - self.start, resident_bytes()))
            await asyncio.sleep(0.5)

    async def run(self, num_streams):
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=num_streams)
        async with httpx2.AsyncClient(base_url=self.server.url, timeout=300, limits=limits) as http:
            clients = [asyncio.create_task(self.client(http)) for _ in range(num_streams)]
            watcher = asyncio.create_task(self.watch_memory())
            await asyncio.gather(*clients)
            await watcher

    def check(self):
        assert not [status for status in self.statuses if status >= 500]
        assert self.outcomes["whole"] > 0
        assert self.outcomes["cut"] > 0
        assert self.outcomes["garbage"] > 0
        self.server.wait_until_idle(60)
        assert self.server.engine.get_num_unfinished_requests() == 0
        assert self.server.get("/health").status_code == 200
        assert self.server.scheduler.num_blocks_by_state[2:] == (0, 0)  # held and fenced
        self.server.engine.engine.reset_prefix_cache()
        self.server.scheduler.check_integrity()
        assert self.server.scheduler.num_blocks_by_state == self.blocks_at_the_start


def test_soak_of_a_few_seconds_leaves_nothing_behind(start):
    server = start(max_num_seqs=24, num_blocks=120)
    soak = Soak(server, [f"prompt {number % 7} of a soak" for number in range(50)], max_tokens=20, seconds=4)
    asyncio.run(soak.run(40))
    soak.check()


@pytest.mark.slow
def test_soak_of_200_streams_on_smollm2_leaves_nothing_behind_and_memory_flat(start, smollm_file):
    """SOAK_STREAMS and SOAK_SERVER_SECONDS say another number and another time."""
    num_streams = int(os.environ.get("SOAK_STREAMS", "200"))
    seconds = float(os.environ.get("SOAK_SERVER_SECONDS", "120"))
    options = {"max_num_seqs": 256, "max_model_len": 1024, "max_queued_requests": 256}
    server = start(path=smollm_file, **options)
    # Pages of the pool are given out when they are first written: all are, so that what grows is something else.
    server.engine.engine.kv_cache.pool.fill_(0)
    prompts = [f"Question {number % 23}: what is the number {number}? Answer:" for number in range(100)]
    soak = Soak(server, prompts, max_tokens=32, seconds=seconds)
    asyncio.run(soak.run(num_streams))
    soak.check()
    settled = [resident for at, resident in soak.memory if at > seconds / 3]
    grown = max(settled) - settled[0]
    figures = {
        "statuses": soak.statuses,
        "outcomes": soak.outcomes,
        "tokens": server.metric("pagedkv:generation_tokens_total"),
    }
    curve = [resident >> 20 for _, resident in soak.memory[:: max(1, len(soak.memory) // 12)]]
    memory = {"resident_mib": curve, "grown_mib": grown >> 20}
    logging.getLogger(__name__).info("%s", json.dumps(figures | memory))
    assert grown < 128 << 20
