"""What requests look like: OpenAI's fields, vLLM's further ones, and what is refused by name."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from pagedkv.server.errors import APIError, short

_MAX_LOGPROBS = 20

# A request's name comes back in a header of the answer.
_REQUEST_ID = re.compile(r"[!-~](?:[ -~]{0,254}[!-~])?")
# What the server tells `apply_chat_template` itself, and names of what that hands on: no variables of a template.
_RESERVED_VARIABLES = frozenset(
    [
        "self",
        "conversation",
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "compiled_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "generation_indices",
    ]
)

# Fields that change nothing here: accounts, storage and routing of OpenAI's own service.
_Ignored = Annotated[Any, Field(default=None)]


def _unless(*harmless: Any) -> AfterValidator:
    """Return what refuses a field that is not implemented, but for values that ask for nothing."""

    def check(found: Any, info: ValidationInfo) -> Any:
        if found is None or found in harmless:
            return found
        name = info.field_name
        raise APIError(400, f"{name}: expected nothing, because it is not implemented, found {short(found)}", name)

    return AfterValidator(check)


_Refused = Annotated[Any, _unless()]


def _check_num_logprobs(found: int, info: ValidationInfo) -> int:
    if not 0 <= found <= _MAX_LOGPROBS:
        name = info.field_name
        raise APIError(400, f"{name}: expected 0 to {_MAX_LOGPROBS}, found {found}", name)
    return found


_NumLogprobs = Annotated[int, AfterValidator(_check_num_logprobs)]


def check_request_id(field: str, found: str) -> str:
    """Return the name of a request; refuse one that could not stand in a header as it is.

    Parameters
    ----------
    field : str
        Where it was found.
    found : str
        The name.
    """
    if _REQUEST_ID.fullmatch(found) is None:
        expected = "1 to 256 printable ASCII characters without a space at either end"
        shown = repr(found) if len(found) <= 256 else f"{len(found)} characters"
        raise APIError(400, f"{field}: expected {expected}, found {shown}", field)
    return found


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """What a stream tells beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Sampling(_Body):
    """Fields that go to `SamplingParams`."""

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    # vLLM's further fields.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: _NumLogprobs | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """Return the keywords of `SamplingParams` that were given."""
        given = {name: getattr(self, name) for name in _Sampling.model_fields}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        return {name: value for name, value in given.items() if value is not None}


class GenerationRequest(_Sampling):
    """Fields of both kinds of completion.

    Attributes
    ----------
    prompt_field : str
        The field that has what is continued.
    """

    prompt_field: ClassVar[str]

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    user: _Ignored
    metadata: _Ignored
    store: _Ignored
    service_tier: _Ignored
    safety_identifier: _Ignored
    prompt_cache_key: _Ignored
    # vLLM's further fields.
    priority: int = 0
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    request_id: Annotated[str, AfterValidator(partial(check_request_id, "request_id"))] | None = None
    return_token_ids: bool = False
    response_format: Annotated[Any, _unless({"type": "text"})] = None
    structured_outputs: _Refused = None
    guided_json: _Refused = None
    guided_regex: _Refused = None
    guided_choice: _Refused = None
    guided_grammar: _Refused = None

    @model_validator(mode="after")
    def _check_generation(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options: expected nothing, because stream is false", "stream_options")
        return self

    @property
    def length_field(self) -> str:
        """The field that bounds the output."""
        return "max_tokens"


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: _NumLogprobs | None = None
    suffix: Annotated[Any, _unless("")] = None
    best_of: Annotated[Any, _unless(1)] = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.echo and self.stream:
            raise APIError(400, "echo: expected false, because stream is true", "echo")
        return self


class TextPart(_Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None

    def as_dict(self) -> dict[str, str]:
        """Return the message as a chat template takes it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        named = {} if self.name is None else {"name": self.name}
        # Templates know the older name of the role.
        return {"role": "system" if self.role == "developer" else self.role, "content": content or "", **named}


class _Conversation(_Body):
    """How a chat template is to write messages."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    chat_template: _Refused = None

    @model_validator(mode="after")
    def _check_conversation(self) -> _Conversation:
        if reserved := sorted(_RESERVED_VARIABLES.intersection(self.chat_template_kwargs)):
            message = f"chat_template_kwargs: expected none of what is set by the server, found {', '.join(reserved)}"
            raise APIError(400, message, "chat_template_kwargs")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message: expected false, because add_generation_prompt is true"
            raise APIError(400, message, "continue_final_message")
        return self


class ChatCompletionRequest(_Conversation, GenerationRequest):
    """The body of `/v1/chat/completions`."""

    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: _NumLogprobs | None = None
    parallel_tool_calls: _Ignored
    tools: Annotated[Any, _unless([])] = None
    tool_choice: Annotated[Any, _unless("none", "auto")] = None
    functions: Annotated[Any, _unless([])] = None
    function_call: Annotated[Any, _unless("none", "auto")] = None
    modalities: Annotated[Any, _unless(["text"])] = None
    audio: _Refused = None
    prediction: _Refused = None
    web_search_options: _Refused = None
    reasoning_effort: _Refused = None
    verbosity: _Refused = None

    @model_validator(mode="after")
    def _check(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError(400, "top_logprobs: expected nothing, because logprobs is false", "top_logprobs")
        return self

    @property
    def length_field(self) -> str:
        """The field that bounds the output: the newer name, if it was used."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class TokenizeRequest(_Conversation):
    """The body of `/tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise APIError(400, "prompt: expected either it or messages", "prompt")
        given = _Conversation.model_fields.keys() & self.model_fields_set
        if self.prompt is not None and given:
            name = min(given)
            raise APIError(400, f"{name}: expected nothing beside prompt, which no template writes", name)
        return self


class DetokenizeRequest(_Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def _token_id(text: str) -> int:
    # Python reads no more digits than some thousands, and no token has more than ten.
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise APIError(400, f"logit_bias: expected token ids as keys, found {short(text)}", "logit_bias")
    return int(text)
