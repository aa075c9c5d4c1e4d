"""PendingChecks: the outcome of a step with drafts that a GPU may still be computing."""

from __future__ import annotations

import torch
from jaxtyping import Int64
from torch import Tensor

from refimpl.executor.drafted_rows import DraftedRows
from refimpl.executor.pending import OnItsWay
from refimpl.outputs import NO_TOKEN, Check, ModelRunnerOutput
from refimpl.row_extras import RowExtras
from refimpl.speculative.proposer import Drafts
from refimpl.speculative.rejection_sampler import Verdict


class PendingChecks:
    """What a step with drafts sends back, once :meth:`result` is asked for it.

    Args:
        num_rows: of the step's batch.
        drafted: the rows that draw.
        drafts: what was drafted for them.
        verdict: what came of it.
        extras: what else is told of rows.
        failure: why nothing was drafted, if so.

    """

    def __init__(
        self,
        num_rows: int,
        drafted: DraftedRows,
        drafts: Drafts,
        verdict: Verdict,
        extras: dict[int, RowExtras],
        failure: str | None,
    ) -> None:
        self._num_rows, self._drafted, self._extras, self._failure = num_rows, drafted, extras, failure
        end = verdict.token_ids.gather(-1, verdict.num_accepted.unsqueeze(-1))
        columns: Int64[Tensor, "S columns"] = torch.cat(
            (end, verdict.num_accepted.unsqueeze(-1), drafts.num.unsqueeze(-1), drafts.token_ids), -1
        )
        self._columns = OnItsWay(columns)

    def result(self) -> ModelRunnerOutput:
        """Wait for the verdict."""
        token_ids = [NO_TOKEN] * self._num_rows
        checks: dict[int, Check] = {}
        rows = zip(self._drafted.batch_rows.tolist(), self._drafted.planned.tolist(), self._columns.arrived(), strict=True)
        for row, planned, (token_id, num_accepted, num, *drafts) in rows:
            token_ids[row] = token_id
            if planned:
                checks[row] = Check(tuple(drafts[:num]), num_accepted)
        return ModelRunnerOutput(tuple(token_ids), self._extras, checks, self._failure)
