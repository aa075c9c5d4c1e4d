"""Text piece by piece: joined, it is what decoding all ids at once gives, and nothing is shown that is taken back."""

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_kinds import TEXTS, byte_level, sentencepiece_like
from tokenizers import decoders, models

from refimpl.loading.folder import FolderCheckpoint
from refimpl.tokenizer import Tokenizer, byte_tokenizer, letter_tokenizer, make_detokenizer


def with_added_tokens():
    """A byte-level vocabulary with added tokens: special or not, and of characters that stand for no byte."""
    backend = byte_level()
    backend.add_tokens(["<tool>", "中<|x|>", "é🙂"])
    backend.add_special_tokens(["<|中|>"])
    return backend


def bytes_within_a_sequence():
    """A decoder that joins bytes and then does more, so that tokens cannot be taken one by one."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("b", "c"), decoders.Strip(" ", 1, 0)])
    return backend


def word_pieces():
    """BERT's kind."""
    vocab = {word: i for i, word in enumerate(["[UNK]", "un", "##aff", "##able", "the", ",", ".", "\ufffd", "n't"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]"])
    return backend


def metaspace():
    """T5's kind."""
    vocab = {token: i for i, token in enumerate(["▁", "▁a", "b", "▁c▁", "?"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    backend.decoder = decoders.Metaspace()
    return backend


KINDS = {
    "bytes": byte_tokenizer(320),
    "byte-level": Tokenizer(byte_level()),
    "added": Tokenizer(with_added_tokens()),
    "sequence": Tokenizer(bytes_within_a_sequence()),
    "sentencepiece": Tokenizer(sentencepiece_like()),
    "word pieces": Tokenizer(word_pieces()),
    "metaspace": Tokenizer(metaspace()),
    "letters": letter_tokenizer(20),
}


def stream(tokenizer, token_ids, skip_special_tokens=True, prompt=()):
    """The pieces, the last one from finish."""
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens, prompt)
    return [*map(detokenizer.append, token_ids), detokenizer.finish()]


def ids_of(tokenizer, **limits):
    return st.lists(st.integers(0, tokenizer.vocab_size + 3), **limits)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_joined_pieces_equal_decoding_all_for_any_ids(kind, skip, data):
    tokenizer = KINDS[kind]
    ids = data.draw(ids_of(tokenizer, max_size=40))
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", ["bytes", "byte-level", "added", "sequence", "sentencepiece"])
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_joined_pieces_equal_decoding_all_for_texts_with_a_stray_token(kind, data):
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(data.draw(st.text(alphabet="ab ,é🙂中\n ", max_size=30)))
    at = data.draw(st.integers(0, len(ids)))
    ids[at:at] = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=3))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_an_output_goes_on_where_its_prompt_ends(kind, data):
    """Prompt and output decoded at once are the prompt's certain text and the pieces; wherever the two are parted."""
    tokenizer, skip = KINDS[kind], data.draw(st.booleans())
    ids = data.draw(ids_of(tokenizer, max_size=40) | st.text("ab é🙂中", max_size=12).map(tokenizer.encode))
    parted = data.draw(st.integers(0, len(ids)))
    prompt, rest = ids[:parted], ids[parted:]
    joined, whole = "".join(stream(tokenizer, rest, skip, prompt)), tokenizer.decode(ids, skip)
    assert whole.endswith(joined)
    before, shown = whole[: len(whole) - len(joined)], tokenizer.decode(prompt, skip)
    if tokenizer.joins_bytes and shown.endswith("\ufffd"):
        assert before in (shown, shown[:-1])
    elif kind == "sentencepiece":
        no_run = [i for i in prompt if not (skip and i in tokenizer.special_ids) and i < tokenizer.vocab_size]
        while no_run and no_run[-1] in tokenizer.byte_token_ids:
            no_run.pop()
        assert before == tokenizer.decode(no_run, skip)
    else:
        assert before == shown


@settings(deadline=None)
@given(st.binary(max_size=12))
@example(b"\xf0\x80\x80\x80\xed\xa0\x80\xf4\x90\xe0\x9f\xc0\xaf\xf8")  # overlong, surrogates, too high, never a lead byte
def test_bytes_become_characters_just_as_tokenizers_makes_them(data):
    tokenizer = KINDS["bytes"]
    assert "".join(stream(tokenizer, list(data))) == tokenizer.decode(list(data))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_branch_goes_on_by_itself(kind, data):
    tokenizer = KINDS[kind]
    stem, one, other = (data.draw(ids_of(tokenizer, max_size=12)) for _ in range(3))
    detokenizer = make_detokenizer(tokenizer, True)
    said = "".join(map(detokenizer.append, stem))
    branch = detokenizer.branch()
    texts = [said, said]
    for number in range(12):  # in turn, so that each could disturb the other
        for which, (ids, goes_on) in enumerate(((one, detokenizer), (other, branch))):
            texts[which] += goes_on.append(ids[number]) if number < len(ids) else ""
    assert texts[0] + detokenizer.finish() == tokenizer.decode(stem + one)
    assert texts[1] + branch.finish() == tokenizer.decode(stem + other)


def test_texts_of_the_embedded_model_come_back(smollm2):
    tokenizer = FolderCheckpoint(smollm2).tokenizer()
    assert tokenizer.is_byte_level
    for text in TEXTS:
        assert "".join(stream(tokenizer, tokenizer.encode(text), skip_special_tokens=False)) == text
    lone = tokenizer.backend.token_to_id("Ã")  # 0xC3, which begins a character
    assert "".join(stream(tokenizer, [lone] * 500)) == "\ufffd" * 500


def test_an_emoji_comes_with_its_last_byte():
    pieces = stream(KINDS["bytes"], [*b"a", *"🙂".encode(), *b"b"])
    assert pieces == ["a", "", "", "", "🙂", "b", ""]


@pytest.mark.parametrize("kind", ["bytes", "sequence"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_emoji_that_the_prompt_was_cut_in_comes_whole(kind, cut):
    emoji = list("🙂".encode())
    prompt, rest = [*b"hi ", *emoji[:cut]], [*emoji[cut:], *b"!"]
    assert "".join(stream(KINDS[kind], rest, prompt=prompt)) == "🙂!"


def test_chinese_beside_latin_comes_at_once():
    assert [p for p in stream(KINDS["bytes"], list("ab中文c".encode())) if p] == ["a", "b", "中", "文", "c"]


def test_lone_bytes_are_shown_as_soon_as_it_is_sure_that_they_are_none():
    assert stream(KINDS["bytes"], [0xF0, 0x41]) == ["", "\ufffdA", ""]
    assert stream(KINDS["bytes"], [0x41, 0xF0]) == ["A", "", "\ufffd"]
    assert stream(KINDS["bytes"], [0xFF] * 3) == ["\ufffd", "\ufffd", "\ufffd", ""]


def test_byte_tokens_wait_for_their_run_to_end():
    """A run of byte tokens is decoded together: one bad byte spoils the good ones before it."""
    tokenizer = KINDS["sentencepiece"]
    good = [3 + byte for byte in "🙂".encode()]
    a = tokenizer.backend.token_to_id("▁a")
    assert stream(tokenizer, [a, *good, a]) == ["a", "", "", "", "", "🙂 a", ""]
    assert "".join(stream(tokenizer, [a, *good, 3 + 0xFF, a])) == "a" + "\ufffd" * 5 + " a"
    assert "".join(stream(tokenizer, [a, *good])) == "a🙂"
    assert "".join(stream(tokenizer, [*good[2:], a], prompt=[a, *good[:2]])) == "🙂 a", "the run began in the prompt"


def test_spaces_are_kept_between_pieces_and_dropped_at_the_start_alone():
    tokenizer = KINDS["sentencepiece"]
    ids = tokenizer.encode("the the a")
    assert stream(tokenizer, ids) == ["the", " the", " a", ""]
    assert stream(tokenizer, ids[1:], prompt=ids[:1]) == [" the", " a", ""]
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


@pytest.mark.parametrize("count", [500, 4000])
@pytest.mark.parametrize("kind", ["bytes", "sequence", "sentencepiece"])
@pytest.mark.parametrize("text", ["hé🙂 ", "\u20ac"])
def test_work_is_in_proportion_to_the_tokens(kind, count, text):
    """Lone bytes and texts of any length: tokens that are decoded, counted over all calls."""
    tokenizer, decoded = Tokenizer(KINDS[kind].backend), 0
    decode = tokenizer.decode

    def counted(token_ids, skip_special_tokens=True):
        nonlocal decoded
        decoded += len(token_ids)
        return decode(token_ids, skip_special_tokens)

    tokenizer.decode = counted
    first = 3 if kind == "sentencepiece" else 0
    lone = [first + 0xE2] * count
    for prompt, ids in [((), lone), (lone, lone), ((), [first + byte for byte in text.encode()] * (count // 4))]:
        decoded = 0
        joined = "".join(stream(tokenizer, ids, prompt=prompt))
        assert decoded <= 20 * (len(ids) + len(prompt))
        assert decode([*prompt, *ids]).endswith(joined)
        assert len(joined) >= len(ids) // 4
