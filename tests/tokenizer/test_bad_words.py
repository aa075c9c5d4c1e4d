"""How each kind of tokenizer writes a bad word."""

import pytest
from tokenizer_kinds import byte_level, sentencepiece_like

from refimpl.sampling.bad_words import ways_to_write
from refimpl.tokenizer.tokenizer import Tokenizer


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "smollm2"])
def test_a_word_is_found_with_and_without_its_space_whatever_the_lengths(kind, request):
    if kind == "smollm2":
        tokenizer = Tokenizer.from_pretrained(request.getfixturevalue("smollm2"))
        words = ["word", "banana", "Zürich", "the", "indistinguishable", "\n", "42"]
    else:
        tokenizer = Tokenizer(byte_level() if kind == "byte_level" else sentencepiece_like())
        words = ["a", "the", "hello", "t", "word"]
    lengths = set()
    for word in words:
        ways = ways_to_write(word, tokenizer)
        before = tokenizer.encode("x,", add_special_tokens=False)
        for text in (word, f" {word}"):
            written = tokenizer.encode(f"x,{text}", add_special_tokens=False)
            assert written[: len(before)] == before
            assert tuple(written[len(before) :]) in ways, (word, text)
        assert all(word in tokenizer.decode(way) for way in ways)
        lengths.add(len({len(way) for way in ways}))
    assert max(lengths) > 1, "some words have more tokens with a space than without, or fewer"
