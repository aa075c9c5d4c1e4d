"""Log-probabilities of tokens, by the raw logits: log_softmax in at least float32, before any parameter changes them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from refimpl.kernels.reference import at_least_float32
from refimpl.logprobs import LOGPROB_FLOOR, TokenLogprobs
from refimpl.sampling.ranking import top

SLICE_BYTES = 64 * 2**20
"""Log-probabilities are worked out for so many bytes of float32 logits at a time: those of a long prompt, 16,384 rows of
128,256, would be 8.4 GB at once."""


def rows_in_a_slice(vocab_size: int) -> int:
    """Rows of float32 logits that are handled at once; at least one."""
    return max(1, SLICE_BYTES // (4 * vocab_size))


def token_logprobs(logits: Float[Tensor, "R V"], token_ids: Int64[Tensor, "R"], counts: list[int]) -> list[TokenLogprobs]:
    """For each row, the log-probability and rank of its token, and the ``counts[row]`` most probable ones.

    What is minus infinity becomes ``LOGPROB_FLOOR``.
    """
    size = rows_in_a_slice(logits.shape[-1])
    found: list[TokenLogprobs] = []
    for first in range(0, len(counts), size):
        rows = slice(first, first + size)
        found += _one_slice(at_least_float32(logits[rows]), token_ids[rows], counts[rows])
    return found


def _one_slice(logits: Float[Tensor, "R V"], token_ids: Int64[Tensor, "R"], counts: list[int]) -> list[TokenLogprobs]:
    # Ranks and order are those of the logits: rounding makes some of them tie as log-probabilities.
    of_token = logits.gather(-1, token_ids.unsqueeze(-1))
    lower_id = torch.arange(logits.shape[-1], device=logits.device) < token_ids.unsqueeze(-1)
    ranks = 1 + ((logits > of_token) | ((logits == of_token) & lower_id)).sum(-1)
    peak = logits.amax(-1, keepdim=True)
    log_mass = (logits - peak).exp().sum(-1, keepdim=True).log()
    most = max(counts)
    values, ids = top(logits, most) if most else (logits[:, :0], token_ids.unsqueeze(-1)[:, :0])
    columns = zip(
        token_ids.tolist(),
        (of_token - peak - log_mass).clamp(min=LOGPROB_FLOOR).flatten().tolist(),
        ranks.tolist(),
        ids.tolist(),
        (values - peak - log_mass).clamp(min=LOGPROB_FLOOR).tolist(),
        counts,
        strict=True,
    )
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(top_ids[:count]), tuple(top_logprobs[:count]))
        for token_id, logprob, rank, top_ids, top_logprobs, count in columns
    ]
