"""The official client, sync, async and streaming, against a live server."""

import asyncio

import openai
import pytest

MESSAGES = [{"role": "user", "content": "What is a block?"}]
BLOCK_SIZE = 8


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_completion_is_that_of_the_engine(client, server):
    found = client.completions.create(model="tiny", prompt="abcdefgh", max_tokens=6, temperature=0)
    again = client.completions.create(
        model="tiny", prompt=[97, 98, 99, 100, 101, 102, 103, 104], max_tokens=6, temperature=0
    )
    assert found.id.startswith("cmpl-")
    assert found.object == "text_completion"
    assert found.choices[0].finish_reason == "length"
    assert found.choices[0].text == again.choices[0].text
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (8, 6, 14)


def test_completion_of_several_prompts_has_choices_in_their_order(client):
    both = client.completions.create(model="tiny", prompt=["abcd", "efgh"], max_tokens=4, temperature=0)
    alone = [
        client.completions.create(model="tiny", prompt=text, max_tokens=4, temperature=0) for text in ("abcd", "efgh")
    ]
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [choice.text for choice in both.choices] == [one.choices[0].text for one in alone]
    assert both.usage.prompt_tokens == 8


def test_completion_draws_sixteen_tokens_by_default(client):
    assert client.completions.create(model="tiny", prompt="a").usage.completion_tokens == 16


def test_completion_echoes_its_prompt_with_log_probabilities(client):
    found = client.completions.create(model="tiny", prompt="abcd", max_tokens=2, temperature=0, echo=True, logprobs=2)
    choice = found.choices[0]
    assert choice.text.startswith("abcd")
    assert choice.logprobs.tokens[:4] == list("abcd")
    assert choice.logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.text_offset[:4] == [0, 1, 2, 3]
    assert len(choice.logprobs.tokens) == 6


def test_completion_scores_a_prompt_alone(client):
    found = client.completions.create(model="tiny", prompt="abcd", max_tokens=0, echo=True, logprobs=0)
    assert found.choices[0].text == "abcd"
    assert len(found.choices[0].logprobs.token_logprobs) == 4
    assert found.usage.completion_tokens == 0


@pytest.mark.parametrize(("kept", "text"), [(2, "cd"), (9, "abcd")])
def test_echo_is_the_text_of_the_tokens_that_truncation_keeps(client, kept, text):
    more = {"truncate_prompt_tokens": kept}
    found = client.completions.create(model="tiny", prompt="abcd", max_tokens=0, echo=True, logprobs=0, extra_body=more)
    choice = found.choices[0]
    assert choice.text == text
    assert choice.logprobs.tokens == list(text)
    assert choice.logprobs.text_offset == list(range(len(text)))


def test_chat_completion_has_a_message_and_usage(client):
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=5)
    assert found.id.startswith("chatcmpl-")
    assert found.object == "chat.completion"
    assert found.choices[0].message.role == "assistant"
    assert found.usage.completion_tokens == 5
    assert found.usage.prompt_tokens == len("<user>What is a block?<a>")


def test_chat_completion_fills_the_context_by_default(client):
    found = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 480}])
    assert found.usage.total_tokens == 512
    assert found.choices[0].finish_reason == "length"


def test_chat_completion_takes_text_parts_and_older_roles(client):
    parts = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    found = client.chat.completions.create(model="tiny", messages=parts, max_tokens=1)
    assert found.usage.prompt_tokens == len("<system>ab<a>")


def test_chat_completion_has_log_probabilities(client):
    found = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    entries = found.choices[0].logprobs.content
    assert len(entries) == 3
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert bytes(entry.bytes).decode() == entry.token


def test_stop_text_ends_a_completion(client):
    whole = client.completions.create(model="tiny", prompt="abcd", max_tokens=40, temperature=1, seed=3).choices[0].text
    stop = whole[5:7]
    found = client.completions.create(model="tiny", prompt="abcd", max_tokens=40, temperature=1, seed=3, stop=stop)
    assert found.choices[0].text == whole.partition(stop)[0]
    assert found.choices[0].finish_reason == "stop"


def test_seed_gives_the_same_text_again(client):
    texts = {
        client.completions.create(model="tiny", prompt="abcd", max_tokens=12, seed=7).choices[0].text for _ in range(2)
    }
    assert len(texts) == 1


def test_further_fields_of_vllm_are_taken(client):
    found = client.completions.create(
        model="tiny",
        prompt="abcd",
        max_tokens=5,
        extra_body={"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "return_token_ids": True},
    )
    assert len(found.choices[0].token_ids) == 5


def test_cached_tokens_are_always_told(client):
    prompt = "the same forty characters, once and again"
    first = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    again = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == 40


def test_salt_keeps_prefixes_apart(client):
    def cached(salt):
        found = client.completions.create(model="tiny", prompt="p" * 33, max_tokens=1, extra_body={"cache_salt": salt})
        return found.usage.prompt_tokens_details.cached_tokens

    assert [cached("x"), cached("y"), cached("x")] == [0, 0, 32]


@pytest.mark.parametrize("n", [1, 3])
def test_chat_stream_is_together_the_whole(client, n):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "n": n, "seed": 5, "temperature": 0.9}
    whole = client.chat.completions.create(**options)
    texts, reasons, roles = [""] * n, {}, []
    with client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            assert chunk.object == "chat.completion.chunk"
            if not chunk.choices:
                usage = chunk.usage
            for choice in chunk.choices:
                roles += [choice.index] if choice.delta.role else []
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == dict.fromkeys(range(n), "length")
    assert roles == list(range(n))
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 20 * n)


def test_completion_stream_is_together_the_whole(client):
    options = {"model": "tiny", "prompt": ["abcd", "wxyz"], "max_tokens": 12, "seed": 5, "logprobs": 1}
    whole = client.completions.create(**options)
    texts, num_logprobs = ["", ""], [0, 0]
    with client.completions.create(**options, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                num_logprobs[choice.index] += len(choice.logprobs.tokens)
    assert texts == [choice.text for choice in whole.choices]
    assert num_logprobs == [12, 12]


def test_stream_ends_with_done(server):
    answer = server.post("/v1/completions", {"prompt": "abcd", "max_tokens": 3, "stream": True})
    events = [line for line in answer.text.splitlines() if line]
    assert all(line.startswith("data: {") for line in events[:-1])
    assert events[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("field", "fields"),
    [("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}), ("top_logprobs", {"top_logprobs": 1})],
)
def test_refused_field_is_told_to_the_client(client, field, fields):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, **fields)
    assert caught.value.param == field
    assert caught.value.body["message"].startswith(f"{field}: expected nothing, because")


def test_async_client_runs_many_at_once(server):
    async def main():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:

            async def text(number):
                stream = await client.completions.create(
                    model="tiny", prompt=f"request {number}", max_tokens=10, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

            return await asyncio.gather(*(text(number) for number in range(20)))

    together = asyncio.run(main())
    with server.client() as client:
        alone = client.completions.create(model="tiny", prompt="request 7", max_tokens=10, temperature=0)
    assert together[7] == alone.choices[0].text
    server.wait_until_idle()


def test_three_samples_share_the_prompt_and_copy_its_last_block_twice(start):
    server = start()
    prompt = "a prompt that ends inside of a block"  # 36 bytes: 4 full blocks of 8, and 4 tokens
    assert len(prompt) == 36
    with server.client() as client:
        stream = client.completions.create(model="tiny", prompt=prompt, n=3, max_tokens=400, stream=True, seed=1)
        seen = {choice.index for chunk, _ in zip(stream, range(12), strict=False) for choice in chunk.choices}
        state = server.get("/debug/state").json()
        shared = server.metric("pagedkv:kv_blocks_by_ref_count", ref_count="3")
        stream.close()
    assert seen == {0, 1, 2}
    [request] = state["requests"]
    tables = [sequence["block_table"] for sequence in request["sequences"]]
    assert len(tables) == 3
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert [state["ref_counts"][block] for block in tables[0][:4]] == [3] * 4
    assert len({table[4] for table in tables}) == 3
    assert shared == 4
    assert server.metric("pagedkv:copied_blocks_total") == 2
    server.wait_until_idle()


def test_three_samples_copy_nothing_when_the_prompt_fills_its_blocks(start):
    server = start()
    with server.client() as client:
        found = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 7}], n=3, max_tokens=4
        )
    assert found.usage.prompt_tokens == 16
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert server.metric("pagedkv:copied_blocks_total") == 0
