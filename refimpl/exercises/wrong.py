"""How a check says that an answer is wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from refimpl.errors import RefimplError


class ExerciseError(RefimplError, AssertionError):
    """An answer is wrong; the text says in which case, and what was expected there."""


def hold(case: str, name: str, answer: object, expected: Tensor, tolerance: float, hint: str = "") -> None:
    """An answer must be a tensor of the expected shape, and as near to it as ``tolerance``, relative and absolute.

    Raises:
        ExerciseError: it is not; the text names the first element that is off.

    """
    if not isinstance(answer, Tensor):
        raise ExerciseError(f"{case}: {name} is a {type(answer).__name__}; it must be a tensor")
    if answer.shape != expected.shape:
        raise ExerciseError(f"{case}: {name} has shape {tuple(answer.shape)}; it must be {tuple(expected.shape)}")
    wrong = ~torch.isclose(answer.double(), expected.double(), rtol=tolerance, atol=tolerance)
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise ExerciseError(
            f"{case}: {name}{place} is {answer[tuple(place)].item():.6g}, not {expected[tuple(place)].item():.6g}; "
            f"{int(wrong.sum())} of {wrong.numel()} are wrong{hint and '. ' + hint}"
        )
