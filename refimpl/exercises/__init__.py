"""Checks of the course's exercises that are too long for a cell. Each takes what a student wrote, and says what is wrong."""

from refimpl.exercises.attention import check_paged_decode, check_partial_and_merge
from refimpl.exercises.verify import check_verify
from refimpl.exercises.worth import check_num_drafts
from refimpl.exercises.wrong import ExerciseError

__all__ = ["ExerciseError", "check_num_drafts", "check_paged_decode", "check_partial_and_merge", "check_verify"]
