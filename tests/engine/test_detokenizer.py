"""Text comes in whole characters, and is in the end the text of all tokens."""

import hypothesis
import pytest
from hypothesis import strategies as st

from pagedkv.engine.detokenizer import Detokenizer, make_decode


def utf8(token_ids):
    """Decode tokens that are single bytes; 256 and above are special and leave nothing."""
    return bytes(token for token in token_ids if token < 256).decode(errors="replace")


def pieces(decode, token_ids, prompt=(), size=1):
    detokenizer = Detokenizer(decode, prompt)
    found = [detokenizer.add(token_ids[at : at + size]) for at in range(0, len(token_ids), size)]
    return [*found, detokenizer.finish()]


def test_character_comes_with_its_last_byte():
    assert pieces(utf8, list("a€".encode())) == ["a", "", "", "€", ""]


def test_characters_that_are_not_complete_come_at_the_end_as_replacements():
    assert pieces(utf8, [97, 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]


def test_wrong_bytes_do_not_hold_the_text_back_for_ever():
    found = pieces(utf8, [0x80] * 40)
    assert max(map(len, found)) <= 5
    assert "".join(found) == "\ufffd" * 40


def test_character_behind_wrong_bytes_is_whole():
    assert "".join(pieces(utf8, [0x80] * 7 + list("🙂".encode()) + [97])) == "\ufffd" * 7 + "🙂a"


def test_special_tokens_leave_nothing():
    assert pieces(utf8, [300, 97, 300, 98]) == ["", "a", "", "b", ""]


@hypothesis.given(st.text(), st.integers(1, 5))
def test_pieces_are_the_text(text, size):
    assert "".join(pieces(utf8, list(text.encode()), size=size)) == text


@hypothesis.given(st.binary(), st.integers(1, 3))
def test_pieces_of_any_bytes_are_what_decoding_them_at_once_gives(data, size):
    assert "".join(pieces(utf8, list(data), size=size)) == data.decode(errors="replace")


@hypothesis.given(st.text())
def test_no_piece_has_a_replacement_that_the_text_has_not(text):
    hypothesis.assume("\ufffd" not in text)
    assert all("\ufffd" not in piece for piece in pieces(utf8, list(text.encode())))


def sentencepiece(token_ids):
    """Decode words with a space before each, without the space at the very beginning, as Llama 2's tokenizer does."""
    return "".join(f" {'abcdefgh'[token]}" for token in token_ids).removeprefix(" ")


def test_first_token_keeps_its_space_when_there_is_a_prompt():
    assert "".join(pieces(sentencepiece, [1, 2], prompt=[0])) == " b c"


TEXTS = [
    "",
    "Hello, world",
    "naïve café — déjà vu",
    "日本語のテキスト",
    "🙂👩‍👩‍👧‍👦 family",
    "a\n\n\tb",
    "\u202b\u05e9\u05dc",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_a_real_tokenizer_comes_piece_by_piece(smollm_tokenizer, text):
    ids = smollm_tokenizer(text, add_special_tokens=False).input_ids
    found = pieces(make_decode(smollm_tokenizer, skip_special_tokens=True), ids)
    assert "".join(found) == text
    assert all("\ufffd" not in piece for piece in found)
