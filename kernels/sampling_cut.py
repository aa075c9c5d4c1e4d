"""Where min_p, top_k and top_p cut a row: the least value that is kept, found without a sort.

Scaled logits ``s = (x − peak) / temperature`` lie between −29, where a mass is one unit of its fixed point, and 0. A filter
keeps the tokens above some value, and of those that tie with it the first few in the vocabulary; so a cut is a pair
(value, id). A row is read twice, by many programs, and what may be cut is then searched by one::

    survey   (row, part)  how many tokens, and how much mass, lie at or above each of a few fixed values; the highest of them
                          that has enough for the filters bounds the cut from below
    shorten  (row, part)  what lies at or above the bound is written down, in order: hundreds of values of a language model,
                          not 10⁵; where a part begins, the counts of those before it say
    cut      (row)        the cut, in this short row; the id of the last tie that is kept, and the mass kept of each tile

The search divides an interval by several pivots at once::

    low ├────────┼────────┼────────┼────────┤ high      one pass: how much (tokens for top_k, mass for top_p) lies at or
               p₀       p₁       p₂       p₃            above each of the PIVOTS; the cut is in the interval where that
                            ├──┼──┼──┤                  comes to reach the goal; the next pass divides that interval

An interval shrinks by PIVOTS in each pass, and its upper end is pulled down to the largest value that is in it, so the
search ends when one value is left, after five passes or so. Masses are integers, so sums are exact, and value and number of
ties follow without rounding. A flat row is shortened little, and then searched in full by one program; a sort takes tens of
passes of it.

Sources: Holtzman et al. 2019 (top-p), Nguyen et al. 2024 (min-p); the search by pivots is that of FlashInfer's sampling
kernels (Ye et al. 2025), with more pivots and exact sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from refimpl.kernels.sampling_mass import GREEDY_BELOW, LOWEST, fixed_point, is_usable, largest, scaled

PART = 2048
"""Tokens that a program surveys and shortens. Like a tile's, their number changes no token."""
PASS = 1024
"""Values of a short row that the search looks at at once."""
PIVOTS = 8
HUGE = tl.constexpr(2**62)


@triton.jit
def _load_scaled(row_logits: tl.tensor, token: tl.tensor, V: tl.tensor, peak: tl.tensor, heat: tl.tensor) -> tl.tensor:
    """Scaled logits of a tile; −inf beyond the vocabulary."""
    value = tl.load(row_logits + token, mask=token < V, other=float("-inf")).to(tl.float32)
    return scaled(value, peak, heat)


@triton.jit
def _numbers_of(
    row: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A row's temperature, top_k, top_p, and the least scaled logit that min_p and the fixed point of masses keep."""
    least = tl.load(min_p + row)
    floor = tl.maximum(LOWEST, tl.where(least > 0.0, tl.log(tl.maximum(least, 1e-37)), float("-inf")))
    return tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row), floor


@triton.jit
def _is_cut(peak: tl.tensor, heat: tl.tensor, k: tl.tensor, p: tl.tensor, floor: tl.tensor, V: tl.tensor) -> tl.tensor:
    """Whether a filter is on in a row that is drawn from."""
    return (heat >= GREEDY_BELOW) & is_usable(peak) & (((k > 0) & (k < V)) | (p < 1.0) | (floor > LOWEST))


@triton.jit
def row_peak(peaks: tl.tensor, row: tl.tensor, num_tiles: tl.tensor, TILES: tl.constexpr) -> tl.tensor:
    """The largest logit of a row, from those of its tiles."""
    tiles = tl.arange(0, TILES)
    return largest(tl.load(peaks + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf")))


@triton.jit
def _pivots(floor: tl.tensor, PIVOTS: tl.constexpr) -> tl.tensor:
    """Values from ``floor`` up, closer to each other towards the peak. [PIVOTS], rising."""
    share = (PIVOTS - tl.arange(0, PIVOTS)).to(tl.float32) / PIVOTS
    return floor * share * share


@triton.jit
def survey_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    peaks: tl.tensor,
    counts: tl.tensor,
    amounts: tl.tensor,
    logits_stride: tl.tensor,
    V: tl.tensor,
    num_tiles: tl.tensor,
    TILES: tl.constexpr,
    PART: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> None:
    """Part ``program_id(1)`` of row ``program_id(0)``: its tokens at or above each pivot, and their mass."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak = row_peak(peaks, row, num_tiles, TILES)
    heat, k, p, floor = _numbers_of(row, temperature, top_k, top_p, min_p)
    if _is_cut(peak, heat, k, p, floor, V):
        s = _load_scaled(logits + row * logits_stride, part * PART + tl.arange(0, PART), V, peak, heat)  # [PART]
        reaches = s[None, :] >= _pivots(floor, PIVOTS)[:, None]  # [PIVOTS, PART]
        place = (row * tl.num_programs(1) + part) * PIVOTS + tl.arange(0, PIVOTS)
        tl.store(counts + place, tl.sum(reaches.to(tl.int32), axis=1))
        tl.store(amounts + place, tl.sum(tl.where(reaches, fixed_point(s)[None, :], 0), axis=1))


@triton.jit
def _surveyed(
    of_parts: tl.tensor, row: tl.tensor, num_parts: tl.tensor, PARTS: tl.constexpr, PIVOTS: tl.constexpr
) -> tl.tensor:
    """What the survey wrote of a row. [PARTS, PIVOTS]."""
    part = tl.arange(0, PARTS)[:, None]
    place = (row * num_parts + part) * PIVOTS + tl.arange(0, PIVOTS)[None, :]
    return tl.load(of_parts + place, mask=part < num_parts, other=0)


@triton.jit
def _bound(
    counts: tl.tensor, amounts: tl.tensor, k: tl.tensor, p: tl.tensor, V: tl.tensor, PIVOTS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The number of the highest pivot with enough at or above it, and whether top_k takes anything.

    ``counts`` and ``amounts`` are the row's, [PIVOTS].
    """
    by_k = (k > 0) & (k < V) & (k < tl.max(counts, axis=0))
    goal = tl.where(p < 1.0, _goal(p, tl.max(amounts, axis=0)), HUGE)
    enough = tl.sum((tl.where(by_k, counts - k, amounts - goal) >= 0).to(tl.int32), axis=0)
    return tl.maximum(enough - 1, 0), by_k


@triton.jit
def shorten_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    peaks: tl.tensor,
    counts: tl.tensor,
    amounts: tl.tensor,
    short: tl.tensor,
    short_ids: tl.tensor,
    logits_stride: tl.tensor,
    V: tl.tensor,
    num_tiles: tl.tensor,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> None:
    """Write the scaled logits of part ``program_id(1)`` at or above the bound, and their ids, behind earlier parts'."""
    row, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    peak = row_peak(peaks, row, num_tiles, TILES)
    heat, k, p, floor = _numbers_of(row, temperature, top_k, top_p, min_p)
    if _is_cut(peak, heat, k, p, floor, V):
        of_parts = _surveyed(counts, row, num_parts, PARTS, PIVOTS)  # [PARTS, PIVOTS]
        reached = tl.sum(of_parts, axis=0)
        number, _ = _bound(reached, tl.sum(_surveyed(amounts, row, num_parts, PARTS, PIVOTS), axis=0), k, p, V, PIVOTS)
        bounding = tl.arange(0, PIVOTS) == number
        before = (tl.arange(0, PARTS) < part)[:, None] & bounding[None, :]
        start = row * V + tl.sum(tl.sum(tl.where(before, of_parts, 0), axis=1), axis=0)
        token = part * PART + tl.arange(0, PART)
        s = _load_scaled(logits + row * logits_stride, token, V, peak, heat)  # [PART]
        stays = s >= tl.sum(tl.where(bounding, _pivots(floor, PIVOTS), 0.0), axis=0)
        place = start + tl.cumsum(stays.to(tl.int32), axis=0) - 1
        tl.store(short + place, s, mask=stays)
        tl.store(short_ids + place, token, mask=stays)


@triton.jit
def _mass_from(short: tl.tensor, length: tl.tensor, low: tl.tensor, PASS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """How many values of a short row lie at or above ``low``, and their mass."""
    count = tl.zeros([PASS], tl.int64)
    mass = tl.zeros([PASS], tl.int64)
    for start in range(0, length, PASS):
        place = start + tl.arange(0, PASS)
        s = tl.load(short + place, mask=place < length, other=float("-inf"))  # [PASS]
        count += (s >= low).to(tl.int64)
        mass += tl.where(s >= low, fixed_point(s), 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _search(
    short: tl.tensor,
    length: tl.tensor,
    low: tl.tensor,
    goal: tl.tensor,
    BY_MASS: tl.constexpr,
    PASS: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The largest value with at least ``goal`` at or above it, and what lies above it; at or above ``low`` there is enough.

    Each pass keeps: at or above ``low`` lies the goal or more, above ``high`` lies ``above``, which is less.
    """
    number = tl.arange(0, PIVOTS)
    high = low * 0.0
    above = goal * 0
    while low < high:
        pivots = tl.where(number == PIVOTS - 1, high, low + (high - low) * ((number + 1) / PIVOTS))  # [PIVOTS], rising
        reach = tl.zeros([PIVOTS, PASS], tl.int64)
        under = tl.full([PIVOTS, PASS], float("-inf"), tl.float32)
        for start in range(0, length, PASS):
            place = start + tl.arange(0, PASS)
            s = tl.load(short + place, mask=place < length, other=float("-inf"))  # [PASS]
            amount = fixed_point(s) if BY_MASS else (s >= low).to(tl.int64)
            reaches = s[None, :] >= pivots[:, None]  # [PIVOTS, PASS]
            reach += tl.where(reaches, amount[None, :], 0)
            under = tl.maximum(under, tl.where(reaches, float("-inf"), s[None, :]))
        reached, largest_under = tl.sum(reach, axis=1), tl.max(under, axis=1)  # [PIVOTS] each
        enough = reached >= goal  # of the first so many pivots
        first_short = tl.sum(enough.to(tl.int32), axis=0)
        low = tl.maximum(low, tl.max(tl.where(enough, pivots, float("-inf")), axis=0))
        # Where even the highest pivot has enough, low is high now, and the search is over.
        if first_short < PIVOTS:
            above = tl.sum(tl.where(number == first_short, reached, 0), axis=0)
            high = tl.max(tl.where(number == first_short, largest_under, float("-inf")), axis=0)
    return high, above


@triton.jit
def cut_kernel(
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    peaks: tl.tensor,
    counts: tl.tensor,
    amounts: tl.tensor,
    shorts: tl.tensor,
    short_ids: tl.tensor,
    cuts: tl.tensor,
    cut_ids: tl.tensor,
    masses: tl.tensor,
    V: tl.tensor,
    num_tiles: tl.tensor,
    num_parts: tl.tensor,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PASS: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> None:
    """The cut of row ``program_id(0)``, and masses of what it keeps, relative to the row's peak; (−inf, V) for no cut."""
    row = tl.program_id(0).to(tl.int64)
    peak = row_peak(peaks, row, num_tiles, TILES)
    heat, k, p, floor = _numbers_of(row, temperature, top_k, top_p, min_p)
    cut, cut_id = heat * 0.0 + float("-inf"), V
    if _is_cut(peak, heat, k, p, floor, V):
        reached = tl.sum(_surveyed(counts, row, num_parts, PARTS, PIVOTS), axis=0)  # [PIVOTS]
        amount = tl.sum(_surveyed(amounts, row, num_parts, PARTS, PIVOTS), axis=0)  # [PIVOTS]
        number, by_k = _bound(reached, amount, k, p, V, PIVOTS)
        bounding = tl.arange(0, PIVOTS) == number
        length = tl.sum(tl.where(bounding, reached, 0), axis=0)
        low = tl.sum(tl.where(bounding, _pivots(floor, PIVOTS), 0.0), axis=0)
        short = shorts + row * V
        # Of those that tie with the floor all stay.
        cut, ties, mass = floor, tl.max(reached, axis=0).to(tl.int64), tl.max(amount, axis=0)
        if by_k:
            low, above = _search(short, length, low, k, False, PASS, PIVOTS)
            cut, ties = low, k - above
            count, mass = _mass_from(short, length, cut, PASS)
            mass -= (count - k) * _mass_at(cut)
        if p < 1.0:
            goal = _goal(p, mass)
            cut, above = _search(short, length, low, goal, True, PASS, PIVOTS)
            ties = tl.cdiv(goal - above, _mass_at(cut))  # no more than top_k left: only their mass is in the goal
        cut_id = _keep(short, short_ids + row * V, length, masses + row * num_tiles, num_tiles, cut, ties, TILES, TILE, PASS)
    tl.store(cuts + row, cut)
    tl.store(cut_ids + row, cut_id)


@triton.jit
def _goal(p: tl.tensor, mass: tl.tensor) -> tl.tensor:
    """The mass that top_p asks for; one unit at least."""
    return tl.maximum(tl.ceil(p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _mass_at(s: tl.tensor) -> tl.tensor:
    """The mass of one token of a scaled logit; at least 1."""
    return tl.maximum(fixed_point(s), 1)


@triton.jit
def _keep(
    short: tl.tensor,
    short_ids: tl.tensor,
    length: tl.tensor,
    masses: tl.tensor,
    num_tiles: tl.tensor,
    cut: tl.tensor,
    ties: tl.tensor,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PASS: tl.constexpr,
) -> tl.tensor:
    """Write the mass of what is kept in each tile; give the id of the last that stays of those that tie with the cut."""
    tiles = tl.arange(0, TILES)
    tl.store(masses + tiles, tl.zeros([TILES], tl.int64), mask=tiles < num_tiles)
    tl.debug_barrier()  # where one thread wrote 0, others add
    seen = ties * 0
    last = length * 0 - 1
    for start in range(0, length, PASS):
        place = start + tl.arange(0, PASS)
        s = tl.load(short + place, mask=place < length, other=float("-inf"))  # [PASS]
        token = tl.load(short_ids + place, mask=place < length, other=0)  # [PASS]
        tied = ((s == cut) & (place < length)).to(tl.int64)
        stays = (tied > 0) & (seen + tl.cumsum(tied, axis=0) <= ties)
        tl.atomic_add(masses + token // TILE, fixed_point(s), mask=((s > cut) & (place < length)) | stays)
        last = tl.maximum(last, tl.max(tl.where(stays, token, -1), axis=0))
        seen += tl.sum(tied, axis=0)
    return last
