"""The exercises of notebook 05: softmax in parts that are merged, and decode attention through a block table."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from refimpl.exercises.wrong import ExerciseError, hold
from refimpl.kernels import attention_cases, reference

Part = tuple[Tensor, Tensor]
"""An average ``o [M, D]`` of values, and the logarithm ``lse [M]`` of its denominator."""
PartialFunction = Callable[[Tensor, Tensor, Tensor, float, Tensor], Part]
MergeFunction = Callable[[Part, Part], Part]
DecodeFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]

EXACT = 1e-9
"""Of float64: sums of some dozen terms, in another order."""
SINGLE = 5e-4
"""Of float32: scores of a hundred carry an error of 1e-5, and their weights as much, relative."""
CUTS = ([0, 13], [0, 1, 13], [0, 6, 12, 13], [0, 4, 4, 8, 13], list(range(14)))
"""Where 13 keys are cut into parts; one of the parts is empty."""
LOUD = 3_000.0
"""Queries so much longer make scores of thousands, whose exp no float64 holds."""
POOLS = (
    {"S": 6, "n": 1, "L": 40, "Hq": 4, "Hkv": 1, "D": 16, "B": 16, "ragged": 1},
    {"S": 2, "n": 1, "L": 5, "Hq": 2, "Hkv": 2, "D": 16, "B": 1},
    {"S": 6, "n": 1, "L": 19, "Hq": 4, "Hkv": 2, "D": 32, "B": 8, "ragged": 1},
    {"S": 1, "n": 1, "L": 70, "Hq": 8, "Hkv": 1, "D": 64, "B": 32},
)


# ---------------------------------------------------------------------- partial and merge


def check_partial_and_merge(partial: PartialFunction, merge: MergeFunction) -> str:
    """Hold a softmax in parts against the whole one, in float64.

    Args:
        partial: ``partial(query [M, D], keys [N, D], values [N, D], scale, visible [M, N]) → (o [M, D], lse [M])``. A row
            that sees no key has o = 0 and lse = −inf.
        merge: ``merge(part, part) → part``.

    Raises:
        ExerciseError: they are wrong; the text says where.

    """
    merge = _watched(merge)
    for loud, queries in ((1.0, 1), (1.0, 5), (LOUD, 5)):
        inputs, expected = _softmax_case(queries, loud)
        about = f"{'one query' if queries == 1 else 'five queries'} over 13 keys" + (
            ", scores of thousands" if loud > 1 else ""
        )
        for edges in CUTS:
            parts = _parts(partial, inputs, edges, about)
            case = f"{about}, cut at {edges}"
            _hold_part(case, reduce(merge, parts), expected)
            _hold_part(f"{case}, merged from behind", reduce(lambda b, a: merge(a, b), reversed(parts)), expected)
        _check_algebra(merge, _parts(partial, inputs, [0, 5, 9, 13], about), about)
    return f"right, for {len(CUTS)} ways to cut the keys, merged in either order, and scores of thousands"


def _softmax_case(queries: int, loud: float) -> tuple[tuple[Tensor, Tensor, Tensor, float, Tensor], Part]:
    """13 keys whose last ``queries`` are the queries' own, and what the definition makes of them."""
    random = torch.Generator().manual_seed(queries)
    query, keys, values = (torch.randn(rows, 16, generator=random, dtype=torch.float64) for rows in (queries, 13, 13))
    visible = torch.arange(13) <= torch.arange(13 - queries, 13)[:, None]
    scores = (loud * query @ keys.T * 0.25).masked_fill(~visible, -math.inf)
    return (loud * query, keys, values, 0.25, visible), (scores.softmax(1) @ values, scores.logsumexp(1))


def _parts(
    partial: PartialFunction, inputs: tuple[Tensor, Tensor, Tensor, float, Tensor], edges: list[int], about: str
) -> list[Part]:
    """The answers for consecutive parts of the keys."""
    query, keys, values, scale, visible = inputs
    found = []
    for first, end in pairwise(edges):
        own = (query, keys[first:end], values[first:end], visible[:, first:end])
        given = tuple(tensor.clone() for tensor in own)
        answer = partial(given[0], given[1], given[2], scale, given[3])
        _hold_unchanged(about, "partial", own, given)
        case = f"{about}, keys {first} to {end} alone"
        scores = (query @ keys[first:end].T * scale).masked_fill(~visible[:, first:end], -math.inf)
        lse = scores.logsumexp(1)
        weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[:, None])
        _hold_part(case, answer, (weights @ values[first:end], lse))
        found.append(answer)
    return found


def _watched(merge: MergeFunction) -> MergeFunction:
    """The same, held to leave its arguments alone."""

    def watched(left: Part, right: Part) -> Part:
        own = (*left, *right)
        given = tuple(tensor.clone() for tensor in own)
        answer = merge((given[0], given[1]), (given[2], given[3]))
        _hold_unchanged("parts of the keys", "merge", own, given)
        return answer

    return watched


def _hold_unchanged(case: str, name: str, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    for one, other in zip(before, after, strict=True):
        if not torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) or not torch.equal(one.isnan(), other.isnan()):
            raise ExerciseError(f"{case}: {name} changed one of its arguments")


def _hold_part(case: str, answer: object, expected: Part) -> None:
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ExerciseError(f"{case}: the answer is a {type(answer).__name__}; it must be a pair (o, lse)")
    for name, value, right in zip(("lse", "o"), answer[::-1], expected[::-1], strict=True):
        hold(case, name, value, right, EXACT)


def _check_algebra(merge: MergeFunction, parts: list[Part], about: str) -> None:
    """Associative, and an empty part changes nothing."""
    a, b, c = parts
    empty = (torch.zeros_like(a[0]), torch.full_like(a[1], -math.inf))
    _hold_part(f"{about}: (a b) c beside a (b c)", merge(merge(a, b), c), merge(a, merge(b, c)))
    for case, left, right, expected in (
        ("a part and an empty one", a, empty, a),
        ("an empty part and one", empty, a, a),
        ("two empty parts", empty, empty, empty),
    ):
        _hold_part(f"{about}: {case}", merge(left, right), expected)


# ---------------------------------------------------------------------- decode through a block table


def check_paged_decode(decode: DecodeFunction) -> str:
    """Hold decode attention through block tables against the definition in float64.

    Every slot that is no sequence's is NaN, and every entry of a table behind its sequence's end names such a block.

    Args:
        decode: ``decode(query [S, Hq, D], k_cache [blocks, B, Hkv, D], v_cache, block_table [S, max_blocks], seq_lens [S],
            scale) → [S, Hq, D]``, in float32, contiguous.

    Raises:
        ExerciseError: it is wrong; the text says for which sequence.

    """
    checked = 0
    for seed, shape in enumerate(POOLS):
        for loud in (1.0, 30.0) if seed == 0 else (1.0,):
            checked += _check_pool(decode, shape, seed, loud)
    return f"right, for {checked} sequences in {len(POOLS)} pools that are NaN wherever they may not be read"


def _check_pool(decode: DecodeFunction, shape: dict[str, int], seed: int, loud: float) -> int:
    """One pool; returns how many sequences were in it."""
    given = attention_cases.make_case(shape, torch.float32, torch.device("cpu"), seed).inputs
    lengths = given["seqused_k"]
    real = lengths > 0
    query, table, lengths = loud * given["query"][real], given["block_table"][real].contiguous(), lengths[real].contiguous()
    k_cache, v_cache, scale = given["k_cache"], given["v_cache"], given["softmax_scale"]
    expected = _definition(query, k_cache, v_cache, table, lengths, scale)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # of numpy, by which kernels are interpreted: what is NaN is told below
        arguments = [tensor.clone() for tensor in (query, k_cache, v_cache, table, lengths)]
        answer = decode(arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], scale)
    about = f"blocks of {shape['B']}, {shape['Hq']} query heads to {shape['Hkv']}" + (", loud queries" if loud > 1 else "")
    _hold_unchanged(about, "decode", (query, k_cache, v_cache, table, lengths), arguments)
    hint = ""
    if isinstance(answer, Tensor) and answer.isnan().any():
        hint = "NaN: a slot behind the context, or of a block that is not the sequence's, was used; 0 · NaN is NaN"
    for s, length in enumerate(lengths.tolist()):
        own = answer[s] if isinstance(answer, Tensor) and len(answer) == len(expected) else answer
        hold(f"{about}, a context of {length}", f"out[{s}]", own, expected[s], SINGLE, hint)
    return len(lengths)


def _definition(
    query: Float[Tensor, "S Hq D"],
    k_cache: Float[Tensor, "blocks B Hkv D"],
    v_cache: Float[Tensor, "blocks B Hkv D"],
    block_table: Int[Tensor, "S max_blocks"],
    seq_lens: Int[Tensor, "S"],
    scale: float,
) -> Float[Tensor, "S Hq D"]:
    """The twin in float64."""
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32)
    wide = (query.double(), k_cache.double(), v_cache.double())
    return reference.paged_attention(*wide, block_table, starts, seq_lens, scale)
