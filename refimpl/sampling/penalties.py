"""Penalties on tokens that a text holds already: pure functions of its token ids, with no counts kept between steps.

So there is nothing that a preemption, a fork or a step planned ahead could lose: what is output and what is prompt is said
by the length of the prompt, not by what was computed when. The price is one pass over the row's tokens in each step.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def apply_penalties(
    logits: Float[Tensor, "R V"],
    token_ids: Int64[Tensor, "R L"],
    num_prompt_tokens: Int64[Tensor, "R"],
    num_tokens: Int64[Tensor, "R"],
    presence: Float[Tensor, "R"],
    frequency: Float[Tensor, "R"],
    repetition: Float[Tensor, "R"],
) -> Float[Tensor, "R V"]:
    """The logits with the three penalties on; no argument is changed. Columns beyond ``num_tokens`` are not read.

    ``repetition`` divides positive logits and multiplies others, of every token in prompt or output (Keskar et al. 2019,
    "CTRL"). ``frequency`` is taken off for each time that the output holds a token, ``presence`` once (OpenAI's API).
    """
    place = torch.arange(token_ids.shape[1], device=token_ids.device)
    written = place < num_tokens.unsqueeze(-1)
    output = written & (place >= num_prompt_tokens.unsqueeze(-1))
    seen = _count(token_ids, written, logits) > 0
    times = _count(token_ids, output, logits)
    factor = repetition.to(logits.dtype).unsqueeze(-1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(seen, repeated, logits)
    logits = logits - frequency.to(logits.dtype).unsqueeze(-1) * times
    return logits - presence.to(logits.dtype).unsqueeze(-1) * (times > 0)


def _count(
    token_ids: Int64[Tensor, "R L"], counted: Bool[Tensor, "R L"], logits: Float[Tensor, "R V"]
) -> Float[Tensor, "R V"]:
    """How often each row holds each token, of the places that count; exact up to 2²⁴ in float32."""
    return torch.zeros_like(logits).scatter_add(-1, token_ids, counted.to(logits.dtype))
