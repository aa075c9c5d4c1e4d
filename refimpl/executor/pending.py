"""PendingOutput: the outcome of a step that a GPU may still be computing.

The ids of the drawn tokens stay on the device, where the next step reads them. A copy is under way to the host from the
moment the step is ordered; who needs it waits for that copy, and for nothing that was ordered after it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from refimpl.outputs import NO_TOKEN, ModelRunnerOutput
from refimpl.row_extras import RowExtras


class OnItsWay:
    """Numbers on their way from the device to the host."""

    def __init__(self, numbers: Int64[Tensor, "..."]) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    def arrived(self) -> list[Any]:
        """Wait for them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers.tolist()


class PendingOutput:
    """What a step sends back, once :meth:`result` is asked for it.

    Args:
        num_rows: of the step's batch.
        drawing: the rows that drew a token.
        token_ids: the tokens, on the device; None where no row drew.
        extras: what else is told of rows.
        draft_failure: why nothing was drafted, where that was tried.

    """

    def __init__(
        self,
        num_rows: int,
        drawing: list[int],
        token_ids: Int64[Tensor, "R"] | None,
        extras: dict[int, RowExtras],
        draft_failure: str | None = None,
    ) -> None:
        self._num_rows = num_rows
        self._drawing = drawing
        self._extras = extras
        self._draft_failure = draft_failure
        self._token_ids = None if token_ids is None else OnItsWay(token_ids)

    def result(self) -> ModelRunnerOutput:
        """Wait for the tokens."""
        token_ids = [] if self._token_ids is None else self._token_ids.arrived()
        if len(token_ids) < self._num_rows:
            drawn, token_ids = token_ids, [NO_TOKEN] * self._num_rows
            for row, token_id in zip(self._drawing, drawn, strict=True):
                token_ids[row] = token_id
        return ModelRunnerOutput(tuple(token_ids), self._extras, draft_failure=self._draft_failure)
