"""Pieces of text add up to the whole, characters stay whole, and nothing from a stop string on is shown."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from common.serving.front.text import MAX_PENDING_TOKENS, REPLACEMENT, IncrementalText, StopStrings, token_text
from tests.common.rollout.fakes import WORDS, word_chat
from tests.common.serving.front.running import chatml

texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=40)


def pieces_of(text: IncrementalText, token_ids: Sequence[int]) -> list[str]:
    return [*(text.push([token_id]) for token_id in token_ids), text.finish()]


@given(prompt=texts, text=texts)
def test_pieces_of_a_text_add_up_and_hold_whole_characters(prompt: str, text: str) -> None:
    chat = chatml()
    pieces = pieces_of(IncrementalText(chat, chat.encode_text(prompt)), chat.encode_text(text))
    assert "".join(pieces) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


@given(prompt=st.lists(st.sampled_from(WORDS), max_size=5), words=st.lists(st.sampled_from([*WORDS, "<|end|>"]), max_size=8))
def test_words_are_separated_as_in_the_whole_text(prompt: list[str], words: list[str]) -> None:
    chat = word_chat()
    before, new = chat.encode_text(" ".join(prompt)), chat.encode_text(" ".join(words))
    assert "".join(pieces_of(IncrementalText(chat, before), new)) == chat.decode([*before, *new])[len(chat.decode(before)) :]


@given(st.lists(st.integers(0, 255), max_size=MAX_PENDING_TOKENS - 1))
def test_any_bytes_add_up_to_what_decoding_them_at_once_gives(content: list[int]) -> None:
    chat = chatml()
    ids_of_bytes = {chat.token_bytes(token_id): token_id for token_id in range(chat.vocab_size)}
    token_ids = [ids_of_bytes[bytes([byte])] for byte in content]
    assert "".join(pieces_of(IncrementalText(chat), token_ids)) == chat.decode(token_ids)


@given(st.data())
def test_text_is_shown_up_to_the_first_stop_string_however_it_is_cut(data: st.DataObject) -> None:
    letters = st.text("ab ", max_size=30)
    text = data.draw(letters)
    stops = data.draw(st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher, shown, stopped = StopStrings(stops), "", False
    for part in parts:
        new, stopped = matcher.push(part)
        shown += new
        if stopped:
            break
    else:
        shown += matcher.finish()
    ends = [text.index(stop) for stop in stops if stop in text]
    first_complete = min((text.index(stop) + len(stop) for stop in stops if stop in text), default=None)
    assert stopped == bool(ends)
    if not ends:
        assert shown == text
    else:  # of two that overlap, the one that is complete first may be the one that begins later
        assert text.startswith(shown)
        assert len(shown) <= (first_complete or 0)
        assert not any(stop in shown for stop in stops)


def test_a_part_of_a_character_is_written_in_bytes() -> None:
    chat = chatml()
    euro = chat.encode_text("\N{EURO SIGN}")
    assert b"".join(map(chat.token_bytes, euro)) == "\N{EURO SIGN}".encode()
    assert token_text(chat, euro[0]) == "bytes:\\xe2"
    assert token_text(chat, chat.encode_text("g")[0]) == "g"
