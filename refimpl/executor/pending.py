"""PendingOutput: the outcome of a step that a GPU may still be computing.

The ids of the drawn tokens stay on the device, where the next step reads them. A copy is under way to the host from the
moment the step is ordered; who needs it waits for that copy, and for nothing that was ordered after it.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from refimpl.outputs import NO_TOKEN, ModelRunnerOutput
from refimpl.row_extras import RowExtras


class PendingOutput:
    """What a step sends back, once :meth:`result` is asked for it.

    Args:
        num_rows: of the step's batch.
        drawing: the rows that drew a token.
        token_ids: the tokens, on the device; None where no row drew.
        extras: what else is told of rows.

    """

    def __init__(
        self, num_rows: int, drawing: list[int], token_ids: Int64[Tensor, "R"] | None, extras: dict[int, RowExtras]
    ) -> None:
        self._num_rows = num_rows
        self._drawing = drawing
        self._extras = extras
        self._copied: torch.cuda.Event | None = None
        self._token_ids = token_ids
        if token_ids is not None and token_ids.is_cuda:
            self._token_ids = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._token_ids.copy_(token_ids, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(token_ids.device))

    def result(self) -> ModelRunnerOutput:
        """Wait for the tokens."""
        if self._token_ids is None:
            return ModelRunnerOutput((NO_TOKEN,) * self._num_rows, self._extras)
        if self._copied is not None:
            self._copied.synchronize()
        if len(self._drawing) == self._num_rows:
            return ModelRunnerOutput(tuple(self._token_ids.tolist()), self._extras)
        drawn = np.full(self._num_rows, NO_TOKEN)
        drawn[self._drawing] = self._token_ids.numpy()
        return ModelRunnerOutput(tuple(drawn.tolist()), self._extras)
