"""Log-probabilities as users get them: dicts by token id, with the tokens' texts."""

from __future__ import annotations

from collections.abc import Callable

from refimpl.logprobs import Logprob, TokenLogprobs
from refimpl.request import Request

TokenText = Callable[[int], str]


def logprob_dict(token: TokenLogprobs, token_text: TokenText | None) -> dict[int, Logprob]:
    """The token itself first, then the most probable ones from rank 1 on; without ``token_text`` they have no text."""

    def one(token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, None if token_text is None else token_text(token_id))

    found = {token.token_id: one(token.token_id, token.logprob, token.rank)}
    for rank, (token_id, logprob) in enumerate(zip(token.top_ids, token.top_logprobs, strict=True), start=1):
        if token_id != token.token_id:
            found[token_id] = one(token_id, logprob, rank)
    return found


def prompt_logprob_dicts(request: Request, token_text: TokenText | None) -> list[dict[int, Logprob] | None] | None:
    """One entry a token of the prompt, the first None; None if they were not asked for, or are not all computed yet."""
    if request.params.prompt_logprobs is None:
        return None
    positions = range(1, len(request.prompt_token_ids))
    if any(position not in request.prompt_logprobs for position in positions):
        return None
    return [None, *(logprob_dict(request.prompt_logprobs[position], token_text) for position in positions)]
