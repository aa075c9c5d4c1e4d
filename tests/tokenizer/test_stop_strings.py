"""Stop strings in a growing text: found wherever the pieces are cut, and nothing is said that is taken back."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refimpl import SamplingParams
from refimpl.tokenizer import byte_tokenizer
from refimpl.tokenizer.stop_strings import StopFinder, automaton
from refimpl.tokenizer.text_stream import TextStream


def oracle(text, stop, first=0):
    """By brute force: of all occurrences that end after the first characters, the one that ends first; then list order."""
    ends = [
        (start + len(one), number)
        for number, one in enumerate(stop)
        for start in range(len(text))
        if text.startswith(one, start) and start + len(one) > first
    ]
    return min(ends, default=None)


def cut(text, stop, include, first=0):
    """What is to be said of a text, and the stop string that ends it."""
    match = oracle(text, stop, first)
    if match is None:
        return text, None
    end, number = match
    return text[: end if include else end - len(stop[number])], stop[number]


def run(pieces, stop, include=False, counts=lambda number: True):
    """Everything that is said, piece by piece; after each, what is held back is the least that must be."""
    finder, said, text = StopFinder(tuple(stop), include), [], ""
    for number, piece in enumerate(pieces):
        said.append(finder.append(piece, counts(number)))
        text += piece
        if finder.found is None:
            held = text[len("".join(said)) :]
            could = [n for one in stop for n in range(1, len(one)) if text.endswith(one[:n])]
            assert text == "".join(said) + held
            assert len(held) == max(could, default=0)
    return [*said, finder.finish()], finder.found


words = st.text("ab", min_size=1, max_size=5)
stops = st.lists(words, min_size=1, max_size=4)
pieces_of_text = st.lists(st.text("abc", max_size=5), max_size=12)


@settings(deadline=None, max_examples=300)
@given(pieces_of_text, stops, st.booleans())
@example(["abcd"], ["abcd", "bc"], False)
@example(["a", "ab"], ["aab", "ab"], False)
@example(["ab"], ["b", "ab"], False)
def test_any_pieces_are_cut_where_the_whole_text_is(pieces, stop, include):
    said, found = run(pieces, stop, include)
    assert ("".join(said), found) == cut("".join(pieces), stop, include)


@settings(deadline=None, max_examples=200)
@given(pieces_of_text, stops, st.integers(0, 12))
def test_what_is_complete_too_early_does_not_count(pieces, stop, early):
    said, found = run(pieces, stop, counts=lambda number: number >= early)
    assert ("".join(said), found) == cut("".join(pieces), stop, False, first=len("".join(pieces[:early])))


def test_of_two_that_are_complete_at_once_the_first_in_the_list_counts():
    assert run(["xab"], ["b", "ab"]) == (["xa", ""], "b")
    assert run(["xab"], ["ab", "b"]) == (["x", ""], "ab")
    assert run(["xabc"], ["abc", "b"]) == (["xa", ""], "b"), "b is complete before abc is"


def test_what_could_become_a_stop_string_waits_and_is_said_when_it_does_not():
    assert run(["Hello", " ", "wor", "ld", "!"], [" world?"])[0] == ["Hello", "", "", "", " world!", ""]
    assert run(["aaa", "a"], ["aab"])[0] == ["a", "a", "aa"]
    assert run(["one\n", "\n", "two"], ["\n\n"]) == (["one", "", "", ""], "\n\n")


def test_stop_strings_of_any_characters():
    for stop in ("</s>", "\n\n", "🙂", "中文", "\u0000", ".*", "\\", "é", "e\u0301"):
        said, found = run([*f"before {stop} after"], [stop])
        assert ("".join(said), found) == ("before ", stop)


def test_each_character_is_looked_at_once(monkeypatch):
    """Steps through the automaton, fallbacks counted, for a text that nearly matches all the time."""
    steps = 0

    class Counted(dict):
        def get(self, key, default=None):
            nonlocal steps
            steps += 1
            return dict.get(self, key, default)

    stop = ("a" * 500 + "b", "a" * 400 + "c")
    automaton.cache_clear()
    finder, node = StopFinder(stop, False), automaton(stop)
    nodes = [node]
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        node.children = Counted(node.children)
    for _ in range(4000):
        finder.append("a")
    finder.append("x")
    assert finder.found is None
    assert steps <= 3 * 4001
    automaton.cache_clear()


# ------------------------------------------------------------------ over tokens


TOKENIZER = byte_tokenizer(320)


def stream(token_ids, **params):
    """Pieces for each token and at the end, and the stop string."""
    text, pieces = TextStream(TOKENIZER, SamplingParams(**params)), []
    for token_id in token_ids:
        found = text.append(token_id)
        pieces.append(text.take())
        if found is not None:
            break
    found = text.finish()
    return [*pieces, text.take()], found


@settings(deadline=None, max_examples=200)
@given(st.text("ab🙂\n", max_size=12), st.lists(st.text("ab🙂\n", min_size=1, max_size=3), min_size=1), st.booleans())
def test_a_stop_string_over_the_bytes_of_its_characters(text, stop, include):
    pieces, found = stream(text.encode(), stop=stop, include_stop_str_in_output=include)
    assert ("".join(pieces), found) == cut(text, stop, include)


def test_a_stop_string_in_what_the_end_shows():
    assert stream([*b"ab", 0xF0], stop=["b\ufffd"]) == (["a", "", "", ""], "b\ufffd")
    assert stream([*b"ab", 0xF0], stop=["\ufffd"], include_stop_str_in_output=True) == (["a", "b", "", "\ufffd"], "\ufffd")
    assert stream([*b"ab", 0xF0], stop=["c"]) == (["a", "b", "", "\ufffd"], None)


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "x"), (2, "x"), (3, "xabc"), (6, "xabcabz")])
def test_stop_strings_count_after_min_tokens(min_tokens, text):
    pieces, found = stream(b"xabcabz", stop=["ab"], min_tokens=min_tokens)
    assert ("".join(pieces), found) == (text, None if text.endswith("z") else "ab")


def test_a_branch_of_a_text_finds_its_stop_string_by_itself():
    text = TextStream(byte_tokenizer(256), SamplingParams(stop=["abc"]))
    for char in "xab":
        text.append(ord(char))
    branch = text.branch()
    assert branch.append(ord("c")) == "abc"
    assert branch.take() == ""
    assert text.append(ord("d")) is None
    assert text.finish() is None
    assert text.take() == "xabd"
    assert branch.finish() == "abc"
