"""What a server owes its clients beside answers: limits, keys, health, metrics, and blocks that come back."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedkv.server.generation import Generator

LONG = {"prompt": "abcd", "max_tokens": 500, "ignore_eos": True}


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_goes_away_frees_its_blocks_with_the_step_in_flight(start, monkeypatch, stream):
    server = start()
    steps, noticed_at = [], []
    server.engine.engine.step_hooks.append(lambda event: steps.append(event.plan.num_sequences))
    discard = server.engine.discard

    def note(found):
        noticed_at.append(len(steps))
        discard(found)

    monkeypatch.setattr(server.engine, "discard", note)
    connection = server.open_stream(LONG | {"stream": stream, "n": 3})
    wait_until(lambda: server.scheduler.usage > 0 and len(steps) > 3)
    connection.close()
    server.wait_until_idle()
    # The step that is in flight may end; no other has the samples.
    assert sum(num > 0 for num in steps[noticed_at[0] :]) <= 1
    assert len(steps) < 400  # a sample would have gone on for 500
    assert server.engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_client_that_is_gone_before_its_answer_begins_frees_its_blocks(start, monkeypatch, path):
    server = start()
    server.model.register_forward_pre_hook(lambda module, arguments: time.sleep(0.01))
    steps = []
    server.engine.engine.step_hooks.append(steps.append)
    start_requests = Generator.start

    async def start_and_wait(self, *arguments):
        streams = await start_requests(self, *arguments)
        await asyncio.sleep(0.5)  # for the client to go
        return streams

    monkeypatch.setattr(Generator, "start", start_and_wait)
    say = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "abcd"}
    connection = server.open_stream(say | {"max_tokens": 450, "ignore_eos": True, "stream": True}, path)
    wait_until(lambda: server.scheduler.usage > 0)
    connection.close()
    server.wait_until_idle()
    assert len(steps) < 200


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_goes_away_leaves_the_queue(start, stream):
    server = start(max_num_seqs=1)
    first = server.open_stream(LONG | {"stream": True})
    wait_until(lambda: server.scheduler.num_requests() == (1, 0))
    second = server.open_stream(LONG | {"stream": stream})
    wait_until(lambda: server.scheduler.num_requests() == (1, 1))
    second.close()
    wait_until(lambda: server.scheduler.num_requests() == (1, 0))
    first.close()
    server.wait_until_idle()


def test_requests_of_others_go_on_when_a_client_goes_away(start):
    server = start()
    connection = server.open_stream(LONG | {"stream": True})
    wait_until(lambda: server.scheduler.usage > 0)
    connection.close()
    answer = server.post("/v1/completions", {"prompt": "abcd", "max_tokens": 20})
    assert answer.status_code == 200
    server.wait_until_idle()


def test_full_queue_is_told_with_a_time_to_come_back(start):
    server = start(max_num_seqs=1, max_queued_requests=1)
    connections = [server.open_stream(LONG | {"stream": True}) for _ in range(2)]
    wait_until(lambda: server.engine.get_num_unfinished_requests() == 2 and server.engine.num_queued_requests == 1)
    answer = server.post("/v1/completions", {"prompt": "abcd"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "RateLimitError")
    assert int(answer.headers["Retry-After"]) >= 1
    for connection in connections:
        connection.close()
    server.wait_until_idle()
    assert server.post("/v1/completions", {"prompt": "abcd"}).status_code == 200


def test_dead_engine_is_told(start):
    server = start()
    assert server.get("/health").status_code == 200

    def fail(module, arguments):
        raise MemoryError("no room for activations")

    server.model.register_forward_pre_hook(fail)
    first = server.post("/v1/completions", {"prompt": "abcd"})
    later = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert [first.status_code, later.status_code, server.get("/health").status_code] == [503, 503, 503]
    assert later.json()["error"]["type"] == "ServiceUnavailableError"


def test_stream_of_a_dead_engine_ends_with_an_error(start):
    server = start()
    with httpx2.stream("POST", server.url + "/v1/completions", json=LONG | {"stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)

        def fail(module, arguments):
            raise MemoryError("no room for activations")

        server.model.register_forward_pre_hook(fail)
        events = [line for line in lines if line]
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == 503
    assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Basic one"}, 401)]
    + [({"Authorization": f"Bearer {key}"}, 200) for key in ("one", "two")],
)
def test_key_is_asked_for(start, headers, status):
    server = start(options={"api_keys": ["one", "two"]})
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers)
    assert answer.status_code == status
    assert server.get("/metrics", headers=headers).status_code == status
    assert server.get("/health").status_code == 200


def test_long_body_is_refused(start):
    server = start(options={"max_body_bytes": 1000})
    answer = server.post("/v1/completions", {"prompt": "x" * 2000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "body")
    assert server.post("/v1/completions", {"prompt": "x" * 100, "max_tokens": 1}).status_code == 200


def test_shares_of_clients_are_those_of_their_keys(start):
    server = start(options={"api_keys": ["one", "two"]})
    for key in ("one", "one", "two"):
        headers = {"Authorization": f"Bearer {key}"}
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers)
    tenants = server.scheduler.stats().tenants
    assert {name: totals.num_requests for name, totals in tenants.items()} == {"key 0": 2, "key 1": 1}


def test_client_with_one_request_does_not_wait_for_one_with_many(start):
    server = start(max_num_seqs=2, options={"api_keys": ["many", "few"]})
    body = {"prompt": "abcd", "max_tokens": 20, "ignore_eos": True}
    ended = []

    async def ask(client, key):
        answer = await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        ended.append(key)

    async def main():
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
            many = [asyncio.create_task(ask(client, "many")) for _ in range(12)]
            while server.scheduler.num_requests() != (2, 10):
                await asyncio.sleep(0.002)
            await asyncio.gather(ask(client, "few"), *many)

    asyncio.run(main())
    assert ended.index("few") <= 5


def test_priority_that_no_number_has_is_refused(start):
    server = start(scheduling_policy="priority")
    answer = server.post("/v1/completions", {"prompt": "abcd", "priority": 2**70})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


def test_lower_priority_number_runs_first(start):
    server = start(scheduling_policy="priority", max_num_seqs=1)
    first = server.open_stream(LONG | {"stream": True})
    wait_until(lambda: server.scheduler.num_requests() == (1, 0))
    ended = []

    async def ask(client, priority):
        body = {"prompt": "abcd", "max_tokens": 4, "priority": priority}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        ended.append(priority)

    async def main():
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:
            tasks = [asyncio.create_task(ask(client, priority)) for priority in (7, 3, 5)]
            while server.scheduler.num_requests() != (1, 3):
                await asyncio.sleep(0.002)
            first.close()
            await asyncio.gather(*tasks)

    asyncio.run(main())
    assert ended == [3, 5, 7]


def test_request_that_needs_more_blocks_than_there_are_names_what_bounds_it(start):
    server = start(num_blocks=70)
    body = {"messages": [{"role": "user", "content": "x"}], "n": 4}
    for field in ("max_tokens", "max_completion_tokens"):
        answer = server.post("/v1/chat/completions", body | {field: 400})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert error["message"].startswith(f"{field}: request needs ")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_long_conversation_is_written_beside_others(start, monkeypatch, path):
    server = start()
    is_writing, may_go_on = threading.Event(), threading.Event()

    def render(messages, **options):
        is_writing.set()
        assert may_go_on.wait(30)
        return "text"

    monkeypatch.setattr(server.engine.engine.get_tokenizer(), "apply_chat_template", render, raising=False)
    body = {"messages": [{"role": "user", "content": "x" * 30_000}]}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(server.post, path, body | ({"max_tokens": 1} if "chat" in path else {}))
        assert is_writing.wait(30)
        assert server.get("/health").status_code == 200
        may_go_on.set()
        assert answer.result().status_code == 200


def test_many_short_prompts_are_tokenized_beside_others(start, monkeypatch):
    server = start()
    is_busy, may_go_on = threading.Event(), threading.Event()
    tokenize = type(server.engine.engine.get_tokenizer()).__call__

    def slow(self, text, **options):
        is_busy.set()
        assert may_go_on.wait(30)
        return tokenize(self, text, **options)

    monkeypatch.setattr(type(server.engine.engine.get_tokenizer()), "__call__", slow)
    with ThreadPoolExecutor() as pool:
        body = {"prompt": ["x" * 200] * 200, "max_tokens": 1}
        answer = pool.submit(server.post, "/v1/completions", body)
        assert is_busy.wait(30)
        assert server.get("/health").status_code == 200
        may_go_on.set()
        assert answer.result().status_code == 200


def test_request_id_comes_back(server):
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "mine"})
    assert answer.json()["id"] == "cmpl-mine"
    assert answer.headers["X-Request-Id"] == "cmpl-mine"


def test_tokens_come_of_text_and_text_of_tokens(server):
    tokens = server.post("/tokenize", {"prompt": "abc", "return_token_strs": True}).json()
    assert tokens == {"tokens": [97, 98, 99], "count": 3, "max_model_len": 512, "token_strs": ["a", "b", "c"]}
    assert server.post("/detokenize", {"tokens": [97, 98, 99]}).json() == {"prompt": "abc"}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert bytes(chat["tokens"]).decode() == "<user>x<a>"


def test_conversation_is_tokenized_as_a_chat_writes_it(server, monkeypatch):
    def render(messages, tokenize, add_generation_prompt, continue_final_message, mood="calm"):
        return f"{messages[0]['content']} {mood} {add_generation_prompt} {continue_final_message}"

    monkeypatch.setattr(server.engine.engine.get_tokenizer(), "apply_chat_template", render, raising=False)
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template_kwargs": {"mood": "glad"},
    }
    tokens = server.post("/tokenize", body).json()["tokens"]
    assert bytes(tokens).decode() == "x glad False True"
    chat = server.post("/v1/chat/completions", body | {"max_tokens": 1, "return_token_ids": True}).json()
    assert chat["prompt_token_ids"] == tokens


def test_version_load_and_ping_answer(server):
    assert server.get("/version").json() == {"version": "unknown"}
    assert server.get("/load").json() == {"server_load": 0}
    assert server.get("/ping").status_code == 200


def test_metrics_are_those_of_the_engine(start):
    server = start()
    server.post("/v1/completions", {"prompt": "p" * 20, "max_tokens": 5, "n": 2})
    server.post("/v1/completions", {"prompt": "p" * 20, "max_tokens": 5})
    families = {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}
    values = {name: family.samples[0].value for name, family in families.items() if family.samples}
    assert values["pagedkv:generation_tokens"] == 15
    assert values["pagedkv:prompt_tokens"] == 40
    assert values["pagedkv:prompt_tokens_cached"] == 16
    assert values["pagedkv:num_requests_running"] == 0
    samples = families["pagedkv:time_to_first_token_seconds"].samples
    assert [sample.value for sample in samples if sample.name.endswith("_count")] == [2]
    assert server.metric("pagedkv:request_success_total", finished_reason="length") == 3
    states = {sample.labels["state"]: sample.value for sample in families["pagedkv:kv_blocks"].samples}
    assert states["held"] == states["fenced"] == 0
    assert states["evictable"] > 0
    assert sum(states.values()) == server.engine.engine.kv_cache.num_blocks - 1


def test_metrics_tell_of_tokens_of_requests_and_steps(start):
    server = start()
    server.post("/v1/completions", {"prompt": "p" * 20, "max_tokens": 5, "n": 2})
    server.post("/v1/completions", {"prompt": "p" * 20, "max_tokens": 5})

    def found(name):
        return server.metric(f"pagedkv:{name}_count"), server.metric(f"pagedkv:{name}_sum")

    assert found("request_prompt_tokens") == (2, 40)
    assert found("request_generation_tokens") == (2, 15)
    # The first token of a sample has no other before it.
    assert found("inter_token_latency_seconds")[0] == 15 - 3
    # What the prefix cache gave is not computed again, and the last token of a sample never is.
    assert found("iteration_tokens_total") == (server.metric("pagedkv:steps_total"), 40 - 16 + 15 - 3)


# Names of vLLM 0.32, but for the three that need watched blocks.
VLLM = {
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"),
    *("cache_config_info", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens"),
    *("prompt_tokens_cached", "generation_tokens", "request_success", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("iteration_tokens_total", "request_prompt_tokens", "request_generation_tokens", "request_num_preemptions"),
}


@pytest.mark.parametrize("prefix", ["vllm", "pagedkv"])
def test_metrics_have_all_names_that_dashboards_know(server, prefix):
    text = server.get(f"/metrics?names={prefix}").text
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {f"{prefix}:{name}" for name in VLLM} <= names


def test_metrics_have_names_of_vllm_when_asked_for(start):
    server = start(options={"vllm_metrics": True})
    names = {family.name for family in text_string_to_metric_families(server.get("/metrics").text)}
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "pagedkv:num_requests_running"} <= names
    alone = {family.name for family in text_string_to_metric_families(server.get("/metrics?names=vllm").text)}
    assert all(name.startswith("vllm:") for name in alone)


def test_metrics_have_our_names_alone_by_default(server):
    names = {family.name for family in text_string_to_metric_families(server.get("/metrics").text)}
    assert all(name.startswith("pagedkv:") for name in names)


def test_shutdown_waits_for_answers(start):
    server = start()

    async def main():
        async with httpx2.AsyncClient(timeout=60) as client:
            body = {"prompt": "abcd", "max_tokens": 60, "ignore_eos": True}
            answer = asyncio.create_task(client.post(server.url + "/v1/completions", json=body))
            while server.scheduler.usage == 0:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(server.stop)
            return await answer

    answer = asyncio.run(main())
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 60
    assert not server.engine.is_running


def test_shutdown_waits_no_longer_than_it_is_told(start):
    server = start(shutdown_timeout=1)
    server.model.register_forward_pre_hook(lambda module, arguments: time.sleep(0.1))
    connection = server.open_stream(LONG | {"stream": True})
    wait_until(lambda: server.scheduler.usage > 0)
    server.stop()  # fails where it takes half a minute; the answer would take longer
    assert not server.engine.is_running
    connection.close()


def test_page_is_open_and_what_it_shows_asks_for_a_key(start):
    server = start(options={"api_keys": ["one"]})
    page = server.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert 'fetch("debug/state"' in page.text
    assert server.get("/debug/state").status_code == 401
    state = server.get("/debug/state", headers={"Authorization": "Bearer one"}).json()
    assert len(state["blocks"]) == len(state["ref_counts"]) == server.engine.engine.kv_cache.num_blocks


def test_page_and_state_are_not_there_without_debug_routes(start):
    server = start(options={"debug_routes": False})
    assert [server.get(path).status_code for path in ("/", "/debug/state")] == [404, 404]
