"""Text piece by piece: joined, it is what decoding all ids at once gives, and nothing is shown that is taken back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import TEXTS, byte_level, sentencepiece_like

from refimpl.loading.folder import FolderCheckpoint
from refimpl.tokenizer import Detokenizer, Tokenizer, byte_tokenizer, letter_tokenizer

KINDS = {
    "bytes": byte_tokenizer(320),
    "byte-level": Tokenizer(byte_level()),
    "sentencepiece": Tokenizer(sentencepiece_like()),
    "letters": letter_tokenizer(20),
}


def stream(tokenizer, token_ids, skip_special_tokens=True):
    """The pieces, the last one from finish; checks that text only grows."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    pieces = []
    for token_id in token_ids:
        before = detokenizer.text
        detokenizer.append(token_id)
        assert detokenizer.text.startswith(before)
        pieces.append(detokenizer.text[len(before) :])
    before = detokenizer.text
    detokenizer.finish()
    assert detokenizer.text.startswith(before)
    return [*pieces, detokenizer.text[len(before) :]]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_joined_pieces_equal_decoding_all_for_any_ids(kind, skip, data):
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", ["bytes", "byte-level", "sentencepiece"])
@settings(deadline=None)
@given(data=st.data())
def test_joined_pieces_equal_decoding_all_for_texts_with_a_stray_token(kind, data):
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(data.draw(st.text(alphabet="ab ,é🙂中\n ", max_size=30)))
    at = data.draw(st.integers(0, len(ids)))
    ids[at:at] = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=3))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_texts_of_the_embedded_model_come_back(smollm2):
    tokenizer = FolderCheckpoint(smollm2).tokenizer()
    for text in TEXTS:
        assert "".join(stream(tokenizer, tokenizer.encode(text), skip_special_tokens=False)) == text


def test_an_emoji_comes_with_its_last_byte():
    pieces = stream(KINDS["bytes"], [*b"a", *"🙂".encode(), *b"b"])
    assert pieces == ["a", "", "", "", "🙂", "b", ""]


def test_lone_bytes_are_shown_when_it_is_sure_that_they_are_none():
    assert stream(KINDS["bytes"], [0xF0, 0x41]) == ["", "\ufffdA", ""]
    assert stream(KINDS["bytes"], [0x41, 0xF0]) == ["A", "", "\ufffd"]
    assert stream(KINDS["bytes"], [0xFF] * 3) == ["", "", "", "\ufffd\ufffd\ufffd"]


def test_byte_tokens_wait_for_their_run_to_end():
    """A run of byte tokens is decoded together: one bad byte spoils the good ones before it."""
    tokenizer = KINDS["sentencepiece"]
    good = [3 + byte for byte in "🙂".encode()]
    a = tokenizer.backend.token_to_id("▁a")
    assert stream(tokenizer, [a, *good, a]) == ["a", "", "", "", "", "🙂 a", ""]
    assert "".join(stream(tokenizer, [a, *good, 3 + 0xFF, a])) == "a" + "\ufffd" * 5 + " a"
    assert "".join(stream(tokenizer, [a, *good])) == "a🙂"


def test_spaces_are_kept_between_pieces_and_dropped_at_the_start_alone():
    tokenizer = KINDS["sentencepiece"]
    ids = tokenizer.encode("the the a")
    assert stream(tokenizer, ids) == ["the", " the", " a", ""]
    # A skipped special token in between does not make the next piece a first one.
    eos = tokenizer.backend.token_to_id("</s>")
    assert stream(tokenizer, [ids[0], eos, ids[1]]) == ["the", "", " the", ""]
    assert stream(KINDS["letters"], [0, 1, 2]) == ["a", " b", " c", ""]


def test_special_tokens_are_skipped_or_shown():
    ids = [104, 256, 105]
    assert stream(KINDS["bytes"], ids) == ["h", "", "i", ""]
    assert stream(KINDS["bytes"], ids, skip_special_tokens=False) == ["h", "<|end|>", "i", ""]


def test_ids_outside_the_vocabulary_have_no_text():
    assert stream(KINDS["bytes"], [104, 320, 10**6, 105]) == ["h", "", "", "i", ""]


def test_nothing_gives_nothing():
    assert stream(KINDS["bytes"], []) == [""]


def test_long_texts_take_time_in_proportion():
    """Each step decodes the last piece and what is held back, not the whole text."""
    tokenizer = KINDS["bytes"]
    longest = 0
    decode = tokenizer.decode

    class Watched(Tokenizer):
        def decode(self, token_ids, skip_special_tokens=True):
            nonlocal longest
            longest = max(longest, len(token_ids))
            return decode(token_ids, skip_special_tokens)

    watched = Watched(tokenizer.backend)
    assert "".join(stream(watched, list("hé🙂 ".encode()) * 500)) == "hé🙂 " * 500
    assert longest <= 8
