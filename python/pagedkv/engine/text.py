"""What the engine asks of a tokenizer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pagedkv.engine.adjustments import bad_word_tokens
from pagedkv.engine.detokenizer import make_decode
from pagedkv.exceptions import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedkv.engine.detokenizer import Decode
    from pagedkv.engine.sampling_params import SamplingParams


class TextCodec:
    """Text of tokens, and tokens of text; without a tokenizer there is no text.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase or None
        The tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._decodes: dict[bool, Decode] = {}
        self._token_texts: dict[int, str] = {}

    def decode(self, *, skip_special_tokens: bool) -> Decode | None:
        """Return what turns token ids into text, or None where there is no tokenizer."""
        if self.tokenizer is None:
            return None
        found = self._decodes.get(skip_special_tokens)
        if found is None:
            found = make_decode(self.tokenizer, skip_special_tokens=skip_special_tokens)
            self._decodes[skip_special_tokens] = found
        return found

    def token_text(self, token: int) -> str | None:
        """Return one token as text, or None where there is no tokenizer."""
        text = self._token_texts.get(token)
        if text is None:
            decode = self.decode(skip_special_tokens=False)
            if decode is None:
                return None
            text = self._token_texts[token] = decode([token])
        return text

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Return the token sequences of a request's `bad_words`."""
        if not params.bad_words:
            return []
        if self.tokenizer is None:
            raise _needs_tokenizer("bad_words")
        return bad_word_tokens(params.bad_words, self.tokenizer)

    def check(self, params: SamplingParams) -> None:
        """Refuse what needs text where there is no tokenizer."""
        if self.tokenizer is None and params.stop:
            raise _needs_tokenizer("stop")

    def render_chat(self, messages: Sequence[Any], **options: Any) -> str:
        """Return a conversation as the tokenizer's template writes it."""
        if self.tokenizer is None:
            raise _needs_tokenizer("messages")
        if getattr(self.tokenizer, "chat_template", None) is None and not options.get("chat_template"):
            raise InvalidArgumentError("chat_template: expected one, because the tokenizer has none, found None")
        render = partial(self.tokenizer.apply_chat_template, list(messages), tokenize=False)
        try:
            text: str = render(**{"add_generation_prompt": True, **options})
        except ImportError:
            # There is no jinja2, or one that is too old.
            raise
        except Exception as error:
            # A template is a program: it raises jinja2's errors, and whatever its expressions raise.
            raise InvalidArgumentError(f"messages: expected what the chat template takes, found {error}") from error
        return text


def _needs_tokenizer(field: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field}: expected nothing, because the engine has no tokenizer")
