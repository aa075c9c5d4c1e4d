"""NgramProposer: the drafts are what followed the last few tokens where they stood before (``speculative.ngram``)."""

from __future__ import annotations

import torch

from refimpl.kernels.transfer import to_device
from refimpl.speculative import ngram
from refimpl.speculative.proposer import DraftRows, Drafts, Proposer


class NgramProposer(Proposer):
    """Prompt lookup with suffixes of ``min_n`` to ``max_n`` tokens. Reads the tokens on the host, and needs no model."""

    name = "ngram"
    needs_token_ids = True

    def __init__(self, min_n: int, max_n: int) -> None:
        ngram.check_lengths(min_n, max_n)
        self.min_n, self.max_n = min_n, max_n

    def propose(self, rows: DraftRows) -> Drafts:
        """Rows whose suffix stands nowhere before get none."""
        device = rows.token_ids.device
        found = []
        for slot, length, planned in zip(
            rows.slots_on_host.tolist(), rows.lengths.tolist(), rows.planned.tolist(), strict=True
        ):
            tokens = rows.token_ids[slot, :length].cpu().numpy() if planned else ()
            found.append(ngram.propose(tokens, planned, self.min_n, self.max_n))
        table = torch.tensor([one + [0] * (rows.most - len(one)) for one in found], dtype=torch.int64)
        return Drafts(to_device(table, device), to_device(torch.tensor([len(one) for one in found]), device))
