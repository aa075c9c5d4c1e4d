"""Penalties, bias, masks, min_tokens and bad words: against transformers' logits processors, and against plain loops."""

import math
import random

import pytest
import torch
from adjust_support import adjusted, plain, rows_of, slots_of
from asserts import assert_close, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

INF = math.inf
V = 50


def random_logits(count, dtype=torch.float32, seed=0):
    return (torch.randn(count, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3).to(dtype)


def random_ids(count, seed):
    return [random.Random(seed).randrange(V) for _ in range(count)]


TEXTS = [(random_ids(n, n), random_ids(m, 100 + m)) for n, m in [(1, 0), (5, 1), (9, 30), (40, 3), (3, 12)]]


def sequences(**asked):
    return [(prompt, output, asked) for prompt, output in TEXTS]


@pytest.fixture(scope="module")
def processors():
    from transformers.generation import logits_process

    return logits_process


def theirs(processor, logits, before=()):
    """transformers takes a batch of equal lengths: one row at a time here, behind tokens that mean nothing."""
    return torch.cat(
        [
            processor(torch.tensor([[*before, *prompt, *output]]), logits[i : i + 1].clone())
            for i, (prompt, output) in enumerate(TEXTS)
        ]
    )


# ---------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("penalty", [0.5, 1.3, 10.0])
def test_repetition_penalty_is_transformers(processors, penalty, dtype):
    logits = random_logits(len(TEXTS), dtype)
    got, _ = adjusted(logits, sequences(repetition_penalty=penalty))
    expected = theirs(processors.RepetitionPenaltyLogitsProcessor(penalty), logits)
    assert_close(got, expected, rtol=1e-6, atol=0)
    assert (got != logits).any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logit_bias_is_transformers_sequence_bias(processors, dtype):
    logits = random_logits(len(TEXTS), dtype)
    bias = {3: -100.0, 7: 2.5, 49: 100.0}
    got, _ = adjusted(logits, sequences(logit_bias=tuple(bias.items())))
    assert_close(got, theirs(processors.SequenceBiasLogitsProcessor({(i,): b for i, b in bias.items()}), logits), 1e-6, 1e-6)


def test_min_tokens_is_transformers_min_new_tokens(processors):
    logits = random_logits(len(TEXTS))
    for least in (0, 1, 2, 12, 13, 31):
        got, _ = adjusted(logits, sequences(min_tokens=least, ending_ids=(4, 9)))
        expected = torch.cat(
            [
                processors.MinNewTokensLengthLogitsProcessor(len(prompt), least, [4, 9])(
                    torch.tensor([[*prompt, *output]]), logits[i : i + 1].clone()
                )
                for i, (prompt, output) in enumerate(TEXTS)
            ]
        )
        assert_same(got, expected)


def test_allowed_token_ids_are_all_others_suppressed(processors):
    logits, allowed = random_logits(len(TEXTS)), (0, 8, 49)
    got, _ = adjusted(logits, sequences(allowed_token_ids=allowed))
    others = [i for i in range(V) if i not in allowed]
    assert_same(got, theirs(processors.SuppressTokensLogitsProcessor(others), logits))


def test_bad_words_are_transformers(processors):
    """Words of one to four tokens, made of the texts' own endings, so that many of them are about to be written."""
    logits, words = random_logits(len(TEXTS)), {(11,), (11, 12), (12, 13, 14, 15)}
    for prompt, output in TEXTS:
        text = [*prompt, *output]
        words |= {(*text[-n:], last) for n in (1, 2, 3) if len(text) >= n for last in (1, 2 + n)}
    words = sorted(words)
    got, _ = adjusted(logits, sequences(bad_word_ids=tuple(words)))
    # Behind tokens that are in no word: up to 5.17 transformers passes over words that are longer than the text.
    before = [next(i for i in range(V) if not any(i in word for word in words))] * 3
    processor = processors.NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
    expected = theirs(processor, logits, before)
    # transformers adds a bias of -inf; only where it lies counts.
    assert (got == -INF).tolist() == (expected == -INF).tolist()
    assert_same(got.masked_fill(got == -INF, 0), logits.masked_fill(got == -INF, 0))
    assert ((got == -INF).sum(-1) >= 2).all()


# ---------------------------------------------------------------------- against plain loops


ids = st.integers(0, V - 1)
halves = st.integers(-4, 4).map(lambda x: x / 2)
asking = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": halves,
        "frequency_penalty": halves,
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.25, 2.0]),
        "logit_bias": st.dictionaries(ids, halves, max_size=4).map(lambda bias: tuple(bias.items())),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=30, unique=True).map(tuple),
        "bad_word_ids": st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=5).map(tuple),
        "min_tokens": st.integers(0, 6),
        "ending_ids": st.lists(ids, max_size=4, unique=True).map(tuple),
    },
)
few = st.one_of(st.integers(0, 3), ids)
texts = st.tuples(st.lists(few, min_size=1, max_size=8), st.lists(few, max_size=12), asking)


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(texts, min_size=1, max_size=5), seed=st.integers(0, 100))
def test_any_mixture_of_rows_is_what_the_plain_loop_gives(batch, seed):
    logits = random_logits(len(batch), torch.float64, seed)
    got, failures = adjusted(logits, batch)
    expected = torch.tensor([plain(row, *one) for row, one in zip(logits.tolist(), batch, strict=True)])
    assert (got == -INF).tolist() == (expected == -INF).tolist()
    assert_close(got.nan_to_num(neginf=0), expected.nan_to_num(neginf=0), rtol=1e-6, atol=1e-6)
    assert failures == {}


@settings(max_examples=50, deadline=None)
@given(batch=st.lists(texts, min_size=2, max_size=5), seed=st.integers(0, 100))
def test_a_row_is_adjusted_the_same_in_any_batch(batch, seed):
    logits = random_logits(len(batch), seed=seed)
    together, _ = adjusted(logits, batch)
    for row, one in enumerate(batch):
        assert_same(adjusted(logits[row : row + 1], [one])[0], together[row : row + 1])


# ---------------------------------------------------------------------- single facts


def test_rows_that_ask_for_nothing_are_not_touched_and_cost_nothing():
    assert rows_of(sequences(temperature=0.5, top_k=3), V).adjustments is None
    mixed = [([1], [2], {}), ([1], [2], {"presence_penalty": 1.0}), ([1], [2], {"min_tokens": 1, "ending_ids": (3,)})]
    asked = rows_of(mixed, V).adjustments
    assert asked.rows == [1], "and a row whose min_tokens are there asks for nothing any more"
    assert asked.forbidden is asked.bias is asked.words is asked.allowed is None


def test_a_slot_forgets_what_its_last_sequence_asked_for():
    slots = slots_of([([1], [2], {"presence_penalty": 1.0, "allowed_token_ids": (3,)})], V)
    slots.admit(slots_admission())
    assert slots._asked == {}


def slots_admission():
    from refimpl.outputs import Admission

    return Admission(0, 9, (1, 2), 1, 0, seed=0, path=0)


def test_presence_and_frequency_look_at_the_output_alone():
    logits = torch.zeros(1, V)
    got, _ = adjusted(logits, [([5, 5, 6], [7, 7, 8], {"presence_penalty": 0.5, "frequency_penalty": 0.25})])
    assert {i: got[0, i].item() for i in (5, 6, 7, 8, 9)} == {5: 0, 6: 0, 7: -1.0, 8: -0.75, 9: 0}


def test_penalties_leave_forbidden_tokens_forbidden():
    asked = {"presence_penalty": -2.0, "repetition_penalty": 0.5, "logit_bias": ((7, 100.0),), "bad_word_ids": ((7,),)}
    got, _ = adjusted(random_logits(1), [([7], [7], asked)])
    assert got[0, 7] == -INF
    assert got.isfinite().sum() == V - 1


def test_the_argument_is_not_changed():
    logits = random_logits(len(TEXTS))
    before = logits.clone()
    adjusted(logits, sequences(presence_penalty=1.0, allowed_token_ids=(1, 2), logit_bias=((1, 1.0),), bad_word_ids=((1,),)))
    assert_same(logits, before)


def test_two_words_that_end_alike_do_not_undo_each_other():
    words = ((5, 9), (6, 9), (7, 9))
    for last, banned in ((5, True), (6, True), (7, True), (8, False)):
        got, _ = adjusted(random_logits(1), [([1], [last], {"bad_word_ids": words})])
        assert (got[0, 9] == -INF).item() is banned


def test_a_word_longer_than_the_text_is_not_written_yet():
    got, _ = adjusted(random_logits(1), [([3], [], {"bad_word_ids": ((0, 0, 3, 9), (3, 8))})])
    assert [(got[0, i] == -INF).item() for i in (9, 8)] == [False, True]


def test_a_kernel_penalises_the_same(monkeypatch):
    """By the interpreter where there is no GPU; rows that ask for nothing, or for something else, are left alone."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    penalties = {"presence_penalty": 0.75, "frequency_penalty": -0.5, "repetition_penalty": 1.3}
    asked = [penalties, {"logit_bias": ((3, 2.0),)}, {}, penalties | {"bad_word_ids": ((7,),)}, {"presence_penalty": 1.0}]
    several = [(prompt, output, wish) for (prompt, output), wish in zip(TEXTS, asked, strict=True)]
    logits = random_logits(len(TEXTS))
    expected, _ = adjusted(logits, several)
    monkeypatch.setattr("refimpl.sampling.adjustments.by_triton", lambda x: True)
    got, _ = adjusted(logits.to(device), several, device=device)
    assert_same(got.cpu(), expected)
    assert_same(logits, random_logits(len(TEXTS)), "the argument is not changed")
