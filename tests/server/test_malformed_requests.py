"""Wrong requests: each is answered with an error in OpenAI's form that names the field, and the server lives."""

import inspect

import pytest

pytest.importorskip("transformers")
from transformers import PreTrainedTokenizerBase

from pagedkv.engine.sample import Sample

APPLY = PreTrainedTokenizerBase.apply_chat_template
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAY = [{"role": "user", "content": "hello"}]


def completion(**fields):
    return {"prompt": "abcd", "max_tokens": 4} | fields


def chat(**fields):
    return {"messages": SAY, "max_tokens": 4} | fields


# Route, body, status, field.
MALFORMED = [
    (COMPLETIONS, b"", 400, None),
    (COMPLETIONS, b"{", 400, None),
    (COMPLETIONS, b"\xff\xfe", 400, None),
    (COMPLETIONS, b"[]", 400, None),
    (COMPLETIONS, b"null", 400, None),
    (COMPLETIONS, b'"text"', 400, None),
    (COMPLETIONS, b"[" * 100_000, 400, None),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, completion(prompt=None), 400, "prompt"),
    (COMPLETIONS, completion(prompt=5), 400, "prompt"),
    (COMPLETIONS, completion(prompt=""), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[[]]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[1.5]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[-1]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[256]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[2**70]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=["a", 5]), 400, "prompt"),
    (COMPLETIONS, completion(prompt="x" * 512), 400, "prompt"),
    (COMPLETIONS, completion(prompt=["a"] * 300), 400, "prompt"),
    (COMPLETIONS, completion(model="other"), 404, "model"),
    (COMPLETIONS, completion(model=5), 400, "model"),
    (COMPLETIONS, completion(n=0), 400, "n"),
    (COMPLETIONS, completion(n=-1), 400, "n"),
    (COMPLETIONS, completion(n=1.5), 400, "n"),
    (COMPLETIONS, completion(n="3"), 400, "n"),
    (COMPLETIONS, completion(n=17), 400, "n"),
    (COMPLETIONS, completion(n=2**70), 400, "n"),
    (COMPLETIONS, completion(n=2, temperature=0), 400, "n"),
    (COMPLETIONS, completion(temperature=-1), 400, "temperature"),
    (COMPLETIONS, completion(temperature="hot"), 400, "temperature"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
    (COMPLETIONS, completion(top_p=0), 400, "top_p"),
    (COMPLETIONS, completion(top_p=1.5), 400, "top_p"),
    (COMPLETIONS, completion(top_k=-2), 400, "top_k"),
    (COMPLETIONS, completion(min_p=2), 400, "min_p"),
    (COMPLETIONS, completion(presence_penalty=3), 400, "presence_penalty"),
    (COMPLETIONS, completion(frequency_penalty=-3), 400, "frequency_penalty"),
    (COMPLETIONS, completion(repetition_penalty=0), 400, "repetition_penalty"),
    (COMPLETIONS, completion(max_tokens=-5), 400, "max_tokens"),
    (COMPLETIONS, completion(max_tokens=0), 400, "max_tokens"),
    (COMPLETIONS, completion(max_tokens=2.5), 400, "max_tokens"),
    (COMPLETIONS, completion(max_tokens=600), 400, "max_tokens"),
    (COMPLETIONS, completion(max_tokens=10**12), 400, "max_tokens"),
    (COMPLETIONS, completion(min_tokens=9), 400, "min_tokens"),
    (COMPLETIONS, completion(stop=5), 400, "stop"),
    (COMPLETIONS, completion(stop=[""]), 400, "stop"),
    (COMPLETIONS, completion(stop_token_ids=[-1]), 400, "stop_token_ids"),
    (COMPLETIONS, completion(logprobs=-1), 400, "logprobs"),
    (COMPLETIONS, completion(logprobs=21), 400, "logprobs"),
    (COMPLETIONS, completion(logprobs=True), 400, "logprobs"),
    (COMPLETIONS, completion(prompt_logprobs=99), 400, "prompt_logprobs"),
    (COMPLETIONS, completion(logit_bias={"a": 1}), 400, "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"1": 200}), 400, "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"999": 1}), 400, "logit_bias"),
    (COMPLETIONS, completion(logit_bias=[1]), 400, "logit_bias"),
    (COMPLETIONS, completion(allowed_token_ids=[]), 400, "allowed_token_ids"),
    (COMPLETIONS, completion(seed="x"), 400, "seed"),
    (COMPLETIONS, completion(stream="yes"), 400, "stream"),
    (COMPLETIONS, completion(stream_options={"include_usage": True}), 400, "stream_options"),
    (COMPLETIONS, completion(stream=True, echo=True), 400, "echo"),
    (COMPLETIONS, completion(suffix="z"), 400, "suffix"),
    (COMPLETIONS, completion(best_of=3), 400, "best_of"),
    (COMPLETIONS, completion(guided_json={}), 400, "guided_json"),
    (COMPLETIONS, completion(priority=1), 400, "priority"),
    (COMPLETIONS, completion(priority="high"), 400, "priority"),
    (COMPLETIONS, completion(cache_salt=""), 400, "cache_salt"),
    (COMPLETIONS, completion(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens"),
    (COMPLETIONS, completion(request_id=""), 400, "request_id"),
    (COMPLETIONS, completion(request_id="a\r\nX-Evil: 1"), 400, "request_id"),
    (COMPLETIONS, completion(request_id="a\n"), 400, "request_id"),
    (COMPLETIONS, completion(request_id="é✓"), 400, "request_id"),
    (COMPLETIONS, completion(request_id=" a"), 400, "request_id"),
    (COMPLETIONS, completion(request_id="a "), 400, "request_id"),
    (COMPLETIONS, completion(request_id="a" * 257), 400, "request_id"),
    (COMPLETIONS, completion(temprature=1), 400, "temprature"),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, None),
    (COMPLETIONS, b'{"prompt": "a", "top_p": 1e999}', 400, "top_p"),
    (COMPLETIONS, b'{"prompt": "a", "logit_bias": {"1": NaN}}', 400, "logit_bias"),
    (COMPLETIONS, completion(top_k=2**70), 400, "top_k"),
    (COMPLETIONS, completion(logit_bias={"1" * 5000: 1}), 400, "logit_bias"),
    (COMPLETIONS, completion(allowed_token_ids=[9], stop_token_ids=[9], min_tokens=1), 400, "allowed_token_ids"),
    (COMPLETIONS, completion(repetition_penalty=1e-300), 400, "repetition_penalty"),
    (COMPLETIONS, completion(repetition_penalty=1e300), 400, "repetition_penalty"),
    (COMPLETIONS, completion(min_tokens=2**70), 400, "min_tokens"),
    (COMPLETIONS, completion(stop_token_ids=[2**70]), 400, "stop_token_ids"),
    (COMPLETIONS, completion(logit_bias={str(2**70): 1}), 400, "logit_bias"),
    (CHAT, {}, 400, "messages"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages="hello"), 400, "messages"),
    (CHAT, chat(messages=[5]), 400, "messages.0"),
    (CHAT, chat(messages=[{"content": "x"}]), 400, "messages.0.role"),
    (CHAT, chat(messages=[{"role": "wizard", "content": "x"}]), 400, "messages.0.role"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages.0.content"),
    (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), 400, "messages.0.role"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages.0.content"),
    (CHAT, chat(messages=[*SAY, {"role": "user", "content": "x" * 600}]), 400, "messages"),
    (CHAT, chat(max_completion_tokens=-1), 400, "max_completion_tokens"),
    (CHAT, chat(max_completion_tokens=5000), 400, "max_completion_tokens"),
    (CHAT, chat(top_logprobs=3), 400, "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=30), 400, "top_logprobs"),
    (CHAT, chat(logprobs=3), 400, "logprobs"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format"),
    (CHAT, chat(audio={"voice": "x"}), 400, "audio"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice"),
    (CHAT, chat(modalities=["text", "audio"]), 400, "modalities"),
    (CHAT, chat(chat_template="{{ x }}"), 400, "chat_template"),
    (CHAT, chat(chat_template_kwargs={"unknown": 1}), 400, "chat_template_kwargs"),
    (CHAT, chat(request_id="a\r\nX-Evil: 1"), 400, "request_id"),
    (CHAT, chat(continue_final_message=True), 400, "continue_final_message"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": SAY}, 400, "prompt"),
    ("/tokenize", {"messages": SAY, "chat_template": "x"}, 400, "chat_template"),
    ("/tokenize", {"messages": SAY, "chat_template_kwargs": {"unknown": 1}}, 400, "chat_template_kwargs"),
    ("/tokenize", {"messages": SAY, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs"),
    ("/tokenize", {"messages": SAY, "continue_final_message": True}, 400, "continue_final_message"),
    ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, 400, "add_generation_prompt"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": [300]}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), MALFORMED)
def test_malformed_request_is_told_its_field(server, path, body, status, param):
    answer = server.post(path, body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["message"]
    assert error["type"].endswith("Error")
    found = error["param"]
    assert found == param or (param is not None and found is not None and found.split(".")[0] == param)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto", "modalities": ["text"], "response_format": {"type": "text"}},
        {"tools": None, "audio": None, "chat_template": None, "guided_json": None, "response_format": None},
    ],
)
def test_field_that_asks_for_nothing_is_passed_over(server, fields):
    assert server.post(CHAT, chat(**fields)).status_code == 200


def test_server_lives_after_all_of_them(server):
    for path, body, _, _ in MALFORMED:
        server.post(path, body)
    assert server.post(COMPLETIONS, completion()).status_code == 200
    server.wait_until_idle()


def test_unsupported_routes_are_told_in_the_same_form(server):
    for path in ("/v1/responses", "/v1/messages", "/v1/embeddings", "/nowhere"):
        answer = server.post(path, {})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")
        assert path in answer.json()["error"]["message"]


def test_wrong_method_is_told_in_the_same_form(server):
    answer = server.get(COMPLETIONS)
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "MethodNotAllowedError")


def test_other_content_is_refused(server):
    answer = server.post(COMPLETIONS, "prompt=abcd", headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-type")


def test_more_samples_than_seats_are_refused_before_one_is_made(server, monkeypatch):
    made = []

    def make(*arguments):
        made.append(arguments)
        return Sample(*arguments)

    monkeypatch.setattr("pagedkv.engine.admission.Sample", make)
    answer = server.post(COMPLETIONS, completion(n=1000))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert answer.json()["error"]["message"] == "n: expected at most max_num_seqs=16, found 1000"
    assert made == []


@pytest.mark.parametrize("name", [*sorted({*inspect.signature(APPLY).parameters} - {"self", "kwargs"}), "messages"])
def test_options_of_the_tokenizer_are_no_variables_of_a_template(server, name):
    answer = server.post(CHAT, chat(chat_template_kwargs={name: "{{ 1 }}"}))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "chat_template_kwargs")
    assert name in error["message"]
    assert "set by the server" in error["message"]


@pytest.mark.parametrize("failure", [ValueError, TypeError, ZeroDivisionError, AttributeError, RecursionError])
def test_failure_of_a_template_names_the_field_that_caused_it(server, monkeypatch, failure):
    def render(messages, level=None, **options):
        if level == "wrong" or messages[0]["content"] == "wrong":
            raise failure("no such level")
        return "text"

    monkeypatch.setattr(server.engine.engine.get_tokenizer(), "apply_chat_template", render, raising=False)
    wrong = [{"role": "user", "content": "wrong"}]
    bodies = {
        "messages": chat(messages=wrong, chat_template_kwargs={"level": "high"}),
        "chat_template_kwargs": chat(chat_template_kwargs={"level": "wrong"}),
    }
    for field, body in bodies.items():
        answer = server.post(CHAT, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert error["message"] == f"{field}: expected what the chat template takes, found no such level"


@pytest.mark.parametrize("found", ["é✓", "a\tb", "a" * 257])
def test_header_that_can_name_no_request_is_refused(server, found):
    answer = server.post(COMPLETIONS, completion(), headers={"X-Request-Id": found.encode()})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "x-request-id")
    assert error["message"].startswith("x-request-id: expected 1 to 256 printable ASCII characters")
    # A header that is not needed is not looked at.
    answer = server.post(COMPLETIONS, completion(request_id="my own"), headers={"X-Request-Id": found.encode()})
    assert (answer.status_code, answer.headers["X-Request-Id"]) == (200, "cmpl-my own")
