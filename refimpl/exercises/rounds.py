"""Rounds of speculation over a tiny vocabulary, where every law can be written down, and what they must come to.

p and q depend on the whole text before, so a sampler that mixes up positions or histories is found out too. Texts are
numbered as the nodes of a tree are: the empty text is 0, and text t continued by token x is ``t · V + x + 1``, so laws are
tables ``[texts, V]``. Twenty thousand texts grow beside each other, each by rounds of its own, until all have ``L`` tokens::

    text ──► draft K tokens by q, one after the other ──► verify(p of all K + 1 texts, …) ──► text + tokens of the verdict

Then the tokens after each text are counted, and held against p by a chi-square test. A first round's last token is among
them if L is K + 1 or more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from refimpl.exercises.wrong import ExerciseError
from refimpl.kernels.philox import Purpose, uniform
from refimpl.outputs import NO_TOKEN
from refimpl.sampling.sampler import draw
from refimpl.speculative.rejection_sampler import round_uniforms

VerifyFunction = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor], object]
"""``verify(target_probs [S, K1, V], draft_ids [S, K], draft_probs [S, K, V], accept_uniforms [S, K], draw_uniforms [S, K1])
→ token_ids [S, K1]``: :func:`refimpl.speculative.rejection_sampler.verify` where each of the texts has K drafts."""
DraftFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""From q after some texts ``[S, V]`` and a uniform number each to the drafted tokens ``[S]``, and the q that is told."""

Z_LIMIT = 12.0
"""(χ² − d) / √(2d) over which a law is wrong, where d is the cells' degrees of freedom. A right law comes there once in
45,000 cases at d = 1, in 440,000 at 2, in 2 million at 3 and in 9 million at 4. The uniform numbers are fixed by the seed,
so a test that passes once always does."""
LEAST_EXPECTED = 5
"""Tokens that are expected less often are counted together with others."""


@dataclass(frozen=True)
class Laws:
    """p and q after every text of a tiny world. Rows need not sum to 1."""

    p: Float[Tensor, "texts V"]
    q: Float[Tensor, "texts V"]


def num_texts(V: int, length: int) -> int:
    """How many texts have fewer than ``length`` tokens."""
    return sum(V**tokens for tokens in range(length))


def tokens_of(text: int, V: int) -> tuple[int, ...]:
    """The tokens of a text."""
    tokens: list[int] = []
    while text:
        text, token = divmod(text - 1, V)
        tokens.append(token)
    return tuple(reversed(tokens))


def make_logits(V: int, length: int, seed: int) -> tuple[Float[Tensor, "texts V"], Float[Tensor, "texts V"]]:
    """Logits of a target and of a draft that knows something of it, for all texts of fewer than ``length`` tokens."""
    random = torch.Generator().manual_seed(seed)
    target, noise = 1.5 * torch.randn(2, num_texts(V, length), V, generator=random)
    return target, 0.6 * target + 0.6 * noise


def drawn_draft(q: Float[Tensor, "S V"], u: Float64[Tensor, "S"]) -> tuple[Int64[Tensor, "S"], Float[Tensor, "S V"]]:
    """A token drawn from q, and q."""
    return draw(q, u), q


def certain_draft(q: Float[Tensor, "S V"], u: Float64[Tensor, "S"]) -> tuple[Int64[Tensor, "S"], None]:
    """The likeliest token, whose q is one-hot: what an n-gram or a greedy draft proposes."""
    return q.argmax(-1), None


@dataclass(frozen=True)
class Rounds:
    """What came of many texts."""

    counts: Int64[Tensor, "texts V"]
    """How often each token came after each text of fewer than ``L`` tokens."""
    first_lengths: Int64[Tensor, "K_plus_2"]
    """How many of the first rounds brought 0, 1, … K + 1 tokens."""


def play(
    laws: Laws, verify: VerifyFunction, K: int, L: int, seed: int = 0, S: int = 20_000, draft: DraftFunction = drawn_draft
) -> Rounds:
    """Let ``S`` texts grow to ``L`` tokens by rounds of ``K`` drafts. ``laws`` must reach to texts of L + K − 1 tokens.

    Raises:
        ExerciseError: an answer of ``verify`` has another shape, or one of its rounds brings no token.

    """
    V, paths = laws.p.shape[1], torch.arange(S)
    counts, texts, lengths = torch.zeros(num_texts(V, L) * V, dtype=torch.int64), torch.zeros_like(paths), 0 * paths
    first_lengths = None
    while len(paths):
        token_ids = _play_round(laws, verify, K, (torch.full_like(paths, seed), paths, lengths), texts, draft)
        came = (token_ids != NO_TOKEN).long().cumprod(-1)
        if first_lengths is None:
            first_lengths = torch.bincount(came.sum(-1), minlength=K + 2)
        for index in range(K + 1):
            counted = (came[:, index] > 0) & (lengths < L)
            cells = texts[counted] * V + token_ids[counted, index]
            counts += torch.bincount(cells, minlength=len(counts))
            texts = torch.where(counted, texts * V + token_ids[:, index] + 1, texts)
            lengths = lengths + counted.long()
        if not came[:, 0].all():
            raise ExerciseError("a round brought no token at all; at the least there is the one drawn")
        going = lengths < L
        paths, texts, lengths = paths[going], texts[going], lengths[going]
    assert first_lengths is not None
    return Rounds(counts.view(-1, V), first_lengths)


def _play_round(
    laws: Laws,
    verify: VerifyFunction,
    K: int,
    numbers: tuple[Int64[Tensor, "S"], Int64[Tensor, "S"], Int64[Tensor, "S"]],
    texts: Int64[Tensor, "S"],
    draft: DraftFunction,
) -> Int64[Tensor, "S K1"]:
    """The tokens of a verdict on ``K`` drafts a text; ``numbers`` are seeds, paths and lengths."""
    seeds, paths, lengths = numbers
    after, ids, told = [texts], [], []
    for index in range(K):
        drafted, q = draft(laws.q[after[-1]], uniform(seeds, paths, lengths + index, Purpose.DRAFT))
        after.append(after[-1] * laws.p.shape[1] + drafted + 1)
        ids.append(drafted)
        told.append(q)
    draft_ids = torch.stack(ids, 1) if ids else texts.new_zeros(len(texts), 0)
    draft_probs = torch.stack([q for q in told if q is not None], 1) if told and told[0] is not None else None
    uniforms = round_uniforms(seeds, paths, lengths, K)
    p = laws.p[torch.stack(after, 1)]
    answer = verify(p, draft_ids, draft_probs, uniforms.accept, uniforms.draw)
    return tokens_in(answer, p)


def tokens_in(answer: object, target_probs: Float[Tensor, "S K1 V"]) -> Int64[Tensor, "S K1"]:
    """The answer of a :data:`VerifyFunction`, if it can be one.

    Raises:
        ExerciseError: it has another type or shape, or holds what is no token.

    """
    if not isinstance(answer, Tensor) or answer.dtype != torch.int64:
        told = f"tensor of {answer.dtype}" if isinstance(answer, Tensor) else type(answer).__name__
        raise ExerciseError(f"the answer is a {told}; it must be a tensor of torch.int64, token_ids [S, K + 1]")
    S, K1, V = target_probs.shape
    if answer.shape != (S, K1):
        raise ExerciseError(f"token_ids has shape {tuple(answer.shape)}; it must be {(S, K1)}")
    wrong = answer[(answer < NO_TOKEN) | (answer >= V)]
    if len(wrong):
        raise ExerciseError(f"{int(wrong[0])} in token_ids is none of the {V} tokens, nor {NO_TOKEN} for none")
    if ((answer[:, :-1] == NO_TOKEN) & (answer[:, 1:] != NO_TOKEN)).any():
        raise ExerciseError(f"a token stands behind a {NO_TOKEN} in token_ids; the round was over there")
    return answer


# ---------------------------------------------------------------------- what must come of them


def length_law(laws: Laws, K: int) -> Float64[Tensor, "K_plus_2"]:
    """The probability that a first round brings 0, 1, … K + 1 tokens, by enumeration.

    It brings more than n if n drafts are accepted, x₁ … xₙ with probability Π min(p, q)(xᵢ | x₁ … xᵢ₋₁).
    """
    p, q = (table.double() / table.double().sum(-1, keepdim=True) for table in (laws.p, laws.q))
    mass, start, more_than = torch.ones(1, dtype=torch.float64), 0, [1.0, 1.0]
    for _ in range(K):
        texts = slice(start, start + len(mass))
        start += len(mass)
        mass = (mass.unsqueeze(-1) * torch.minimum(p[texts], q[texts])).flatten()
        more_than.append(float(mass.sum()))
    return torch.tensor(more_than, dtype=torch.float64) - torch.tensor([*more_than[1:], 0.0], dtype=torch.float64)


def hold_lengths(rounds: Rounds, laws: Laws) -> None:
    """The numbers of tokens that first rounds bring must be those of :func:`length_law`.

    Raises:
        ExerciseError: they are not.

    """
    counts, expected = rounds.first_lengths, length_law(laws, len(rounds.first_lengths) - 2)
    if (z := chi_square_z(counts, expected)) > Z_LIMIT:
        laws_told = [", ".join(f"{n}: {x:.1%}" for n, x in enumerate(law) if x) for law in (counts / counts.sum(), expected)]
        raise ExerciseError(f"a first round brings so many tokens: {laws_told[0]}; must be {laws_told[1]} (z = {z:.0f})")


def hold_law(rounds: Rounds, laws: Laws) -> None:
    """The tokens after every text must be p's.

    Raises:
        ExerciseError: they are not; the text names the worst.

    """
    worst = max(_cells(rounds, laws), default=(0.0, 0))
    if worst[0] > Z_LIMIT:
        z, text = worst
        counts, p = rounds.counts[text], laws.p[text] / laws.p[text].sum()
        token = int((counts / counts.sum() - p).abs().argmax())
        before = list(tokens_of(text, laws.p.shape[1]))
        raise ExerciseError(
            f"position {len(before)}, after the tokens {before}: token {token} came in {counts[token] / counts.sum():.1%} "
            f"of {int(counts.sum()):,} draws, and p is {p[token]:.1%} (z = {z:.0f})"
        )


def _cells(rounds: Rounds, laws: Laws) -> Iterator[tuple[float, int]]:
    """The z of every text that came to be, with its number."""
    for text in rounds.counts.sum(-1).nonzero().flatten().tolist():
        yield chi_square_z(rounds.counts[text], laws.p[text]), text


def chi_square_z(counts: Int64[Tensor, "cells"], weights: Float[Tensor, "cells"]) -> float:
    """How far counts lie from their law: (χ² − d) / √(2d) with d degrees of freedom; infinite where p is 0.

    Cells that expect fewer than ``LEAST_EXPECTED`` are counted as one, with the next larger one if need be.
    """
    counts = counts.double()
    expected = weights.double() / weights.double().sum() * counts.sum()
    if (counts[expected == 0] > 0).any():
        return math.inf
    order = expected.argsort()
    sums = expected[order].cumsum(0)
    # So many of the least make one cell: those under the limit, and as many more as bring their sum to it.
    merged = max(int((expected < LEAST_EXPECTED).sum()), int((sums < LEAST_EXPECTED).sum()) + 1)
    observed = torch.cat((counts[order[:merged]].sum()[None], counts[order[merged:]]))
    expected = torch.cat((sums[merged - 1][None], expected[order[merged:]])) if merged <= len(sums) else sums[-1:]
    freedom = len(expected) - 1
    if freedom < 1:
        return 0.0
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))
