"""The check of notebook 06's exercise: what is right passes, and every planted fault is found out."""

from dataclasses import replace

import pytest
import torch

from refimpl.exercises import ExerciseError, check_verify
from refimpl.exercises.wrong_verifiers import RIGHT, WRONG
from refimpl.speculative.rejection_sampler import verify


def library(p, ids, q, accept, drawn):
    return verify(p, ids, q, torch.full((len(ids),), ids.shape[1]), accept, drawn).token_ids


@pytest.mark.parametrize("right", [library, RIGHT.verify])
def test_what_is_right_passes(right):
    assert check_verify(right).startswith("right, for 3 laws of 20,000 texts")


def test_another_way_to_draw_is_right_too():
    """The law is what counts: here a number counts from the other end of the vocabulary."""

    def from_behind(p, ids, q, accept, drawn):
        last = p.shape[-1] - 1
        token_ids = library(p.flip(-1), last - ids, q.flip(-1), 1 - accept, 1 - drawn)
        return torch.where(token_ids < 0, token_ids, last - token_ids)

    assert check_verify(from_behind).startswith("right, ")


OF_DRAFTS = {"argmax draft with softmax q", "different temperatures"}


@pytest.mark.parametrize("fault", sorted(WRONG.keys() - OF_DRAFTS))
def test_a_fault_is_found_out(fault):
    with pytest.raises(ExerciseError, match=r"z = |changed one of its arguments"):
        check_verify(WRONG[fault][0])


def test_a_missing_guard_is_found_out():
    with pytest.raises(ExerciseError, match="equal up to rounding"):
        check_verify(replace(RIGHT, has_guard=False).verify)


def test_the_text_says_where_a_law_is_wrong():
    with pytest.raises(ExerciseError) as told:
        check_verify(WRONG["redraw from p"][0])
    assert str(told.value).startswith("K = 3, temperature 1, top-k 4: position 0, after the tokens []: token ")
    assert "% of 20,000 draws, and p is " in str(told.value)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda ids: ids.tolist(), "the answer is a list; it must be a tensor of torch.int64"),
        (lambda ids: ids.float(), "the answer is a tensor of torch.float32"),
        (lambda ids: ids[:, 1:], r"token_ids has shape \(20000, 3\); it must be \(20000, 4\)"),
        (lambda ids: ids + 1, "4 in token_ids is none of the 4 tokens"),
        (lambda ids: ids.flip(1), "a token stands behind a -1"),
        (lambda ids: ids * 0 - 1, "a round brought no token at all"),
    ],
)
def test_an_answer_of_another_kind_is_told_what_is_wanted(spoil, text):
    with pytest.raises(ExerciseError, match=text):
        check_verify(lambda *arguments: spoil(library(*arguments)))
