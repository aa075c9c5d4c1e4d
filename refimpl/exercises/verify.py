"""The exercise of notebook 06: the check of drafted tokens that leaves the target's law as it is."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from refimpl.exercises.rounds import Laws, VerifyFunction, drawn_draft, hold_law, hold_lengths, make_logits, play, tokens_in
from refimpl.exercises.wrong import ExerciseError
from refimpl.speculative.rejection_sampler import verify_coupled

V, L, TEXTS = 4, 4, 20_000
CASES = ((3, 1.0, V), (1, 1.0, V), (2, 0.5, V - 1))
"""K, temperature, and how many of the likeliest tokens are kept."""
JUST_UNDER_1 = 1 - 2**-33


def check_verify(verify: VerifyFunction) -> str:
    """Hold a check of drafts against laws that can be written down, over tens of thousands of rounds.

    Args:
        verify: ``verify(target_probs [S, K1, V], draft_ids [S, K], draft_probs [S, K, V], accept_uniforms [S, K],
            draw_uniforms [S, K1]) → token_ids [S, K1]``, where K1 is K + 1: the accepted drafts, then the one token drawn,
            then -1. Probabilities are float32 and sum to 1. How a number becomes a token is free, as long as the law holds.

    Raises:
        ExerciseError: it is wrong; the text says where.

    """
    verify = _watched(verify)
    for K, temperature, kept in CASES:
        _check_law(verify, K, temperature, kept)
    _check_same_law(verify)
    _check_greedy(verify)
    _check_rounding(verify)
    return f"right, for {len(CASES)} laws of {TEXTS:,} texts each, a draft that is the target, and greedy rows"


def make_laws(K: int, temperature: float = 1.0, kept: int = V) -> Laws:
    """Both laws for every text that ``K`` drafts reach; ``kept`` is their top-k."""

    def law(logits: Tensor) -> Tensor:
        floor = logits.topk(kept).values[:, -1:]
        return (logits / temperature).masked_fill(logits < floor, float("-inf")).softmax(-1)

    target, draft = make_logits(V, L + K, seed=0)
    return Laws(law(target), law(draft))


def _watched(verify: VerifyFunction) -> VerifyFunction:
    """The same, held to leave its arguments alone."""

    def watched(p: Tensor, ids: Tensor, q: Tensor | None, accept: Tensor, drawn: Tensor) -> object:
        own = [tensor for tensor in (p, ids, q, accept, drawn) if tensor is not None]
        before = [tensor.clone() for tensor in own]
        answer = verify(p, ids, q, accept, drawn)
        if not all(map(torch.equal, own, before)):
            raise ExerciseError("verify changed one of its arguments")
        return answer

    return watched


def _check_law(verify: VerifyFunction, K: int, temperature: float, kept: int) -> None:
    laws = make_laws(K, temperature, kept)
    try:
        rounds = play(laws, verify, K, L, S=TEXTS)
        hold_law(rounds, laws)
        hold_lengths(rounds, laws)
    except ExerciseError as error:
        raise ExerciseError(f"K = {K}, temperature {temperature:g}, top-k {kept}: {error}") from error


def _check_same_law(verify: VerifyFunction) -> None:
    """A draft that is the target is accepted, always."""
    p = make_laws(2).p
    rounds = play(Laws(p, p), verify, K=2, L=L, S=2_000)
    if (fewer := 2_000 - int(rounds.first_lengths[3])) > 0:
        raise ExerciseError(f"q is p, and {fewer} of 2,000 rounds brought fewer than K + 1 = 3 tokens; each must bring 3")


def _check_greedy(verify: VerifyFunction) -> None:
    """Where p is one-hot the tokens are the argmax, whatever is drafted."""
    random = torch.Generator().manual_seed(0)
    argmax = torch.randint(0, V, (500, 4), generator=random)
    p = torch.nn.functional.one_hot(argmax, V).float()
    q = torch.rand(500, 3, V, generator=random).square().softmax(-1)
    ids, numbers = torch.randint(0, V, (500, 3), generator=random), _numbers((500, 4), random)
    ids[::2] = argmax[::2, :3]
    for told, law in (("q is spread", q), ("q is one-hot too", torch.nn.functional.one_hot(ids, V).float())):
        got = tokens_in(verify(p, ids, law, numbers[:, :3], numbers), p)
        wanted = verify_coupled(argmax, ids, torch.full((500,), 3)).token_ids
        if (wrong := (got != wanted).any(-1)).any():
            row = int(wrong.nonzero()[0])
            raise ExerciseError(
                f"p is one-hot at {argmax[row].tolist()}, {told}, drafted was {ids[row].tolist()}: the tokens are "
                f"{got[row].tolist()}, not {wanted[row].tolist()}"
            )


def _check_rounding(verify: VerifyFunction) -> None:
    """Laws that differ by a rounding: whatever is left of p − q, a token of p must come."""
    random = torch.Generator().manual_seed(1)
    p = torch.rand(500, 2, V, generator=random).double().softmax(-1).float()
    p[::2, :, -1] = 0
    q = p[:, :1] * (1 + 1e-7 * torch.randint(-1, 2, (500, 1, V), generator=random))
    ids, _ = drawn_draft(q[:, 0], _numbers((500,), random))
    just_under = torch.full((500, 1), JUST_UNDER_1, dtype=torch.float64)
    got = tokens_in(verify(p, ids[:, None], q, just_under, _numbers((500, 2), random)), p)
    if (got[:, 0] < 0).any() or (p[torch.arange(500), 0, got[:, 0]] == 0).any():
        raise ExerciseError("p and q are equal up to rounding, and a token came that p forbids, or none at all")


def _numbers(shape: tuple[int, ...], random: torch.Generator) -> Float64[Tensor, "..."]:
    return torch.rand(shape, generator=random, dtype=torch.float64)
