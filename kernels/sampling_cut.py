"""Where min_p, top_k and top_p cut a row: the least value that is kept, found without a sort.

Scaled logits ``s = (x − peak) / temperature`` lie between −29, where a mass is one unit of its fixed point, and 0. A filter
keeps the tokens above some value, and of those that tie with it the first few in the vocabulary; so a cut is a pair
(value, id). A row is read three times::

    survey      how many tokens, and how much mass, lie at or above each of a few fixed values; the highest of them that has
                enough for the filters bounds the cut from below
    shorten     what lies at or above the bound is written down, in order: hundreds of values of a language model, not 10⁵
    (search)    the cut, in this short row
    keep        the id of the last tie that is kept, and the mass of what is kept in each tile

The search divides an interval by several pivots at once::

    low ├────────┼────────┼────────┼────────┤ high      one pass: how much (tokens for top_k, mass for top_p) lies at or
               p₀       p₁       p₂       p₃            above each of the PIVOTS; the cut is in the interval where that
                            ├──┼──┼──┤                  comes to reach the goal; the next pass divides that interval

An interval shrinks by PIVOTS in each pass, and its upper end is pulled down to the largest value that is in it, so the
search ends when one value is left, after five passes or so. Masses are integers, so sums are exact, and value and number of
ties follow without rounding. A flat row is shortened little, and then searched in full; a sort takes tens of passes of it.

Sources: Holtzman et al. 2019 (top-p), Nguyen et al. 2024 (min-p); the search by pivots is that of FlashInfer's sampling
kernels (Ye et al. 2025), with more pivots and exact sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from refimpl.kernels import reference

GREEDY_BELOW = tl.constexpr(reference.GREEDY_BELOW)
MASS_ONE = tl.constexpr(2.0**42)
"""The mass of a row's peak; 2²⁰ such masses fit into 62 bits."""
LOWEST = tl.constexpr(-29.0)
"""Scaled logits under it have no mass: exp(−29) · 2⁴² = 1.1."""
CUT_TILES = {"SEARCH_TILE": 1024, "PIVOTS": 8}


@triton.jit
def largest(value: tl.tensor) -> tl.tensor:
    """The largest of a tile; NaN if any is NaN or +inf."""
    bad = (value != value) | (value == float("inf"))
    peak = tl.max(tl.where(bad, float("-inf"), value), axis=0)
    return tl.where(tl.max(bad.to(tl.int32), axis=0) > 0, float("nan"), peak)


@triton.jit
def is_usable(peak: tl.tensor) -> tl.tensor:
    """Whether a row's largest logit is a finite number."""
    return tl.abs(peak) < float("inf")


@triton.jit
def below(value: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """How far values lie from their peak; −inf where the peak itself is."""
    return value - tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def scaled(value: tl.tensor, peak: tl.tensor, heat: tl.tensor) -> tl.tensor:
    """``(value − peak) / temperature``, rounded as torch rounds; of use where the temperature is not that of greedy rows."""
    return tl.div_rn(below(value, peak), tl.maximum(heat, GREEDY_BELOW))


@triton.jit
def fixed_point(s: tl.tensor) -> tl.tensor:
    """Masses of scaled logits, as integers; 0 for NaN, which comes of rows that are refused."""
    mass = tl.exp(s) * MASS_ONE
    return tl.where(s >= LOWEST, mass, 0.0).to(tl.int64)


@triton.jit
def is_kept(s: tl.tensor, token: tl.tensor, cut: tl.tensor, cut_id: tl.tensor) -> tl.tensor:
    """Which tokens are on the kept side of a cut."""
    return (s > cut) | ((s == cut) & (token <= cut_id))


@triton.jit
def _load_scaled(row_logits: tl.tensor, token: tl.tensor, V: tl.tensor, peak: tl.tensor, heat: tl.tensor) -> tl.tensor:
    """Scaled logits of a tile; −inf beyond the vocabulary."""
    value = tl.load(row_logits + token, mask=token < V, other=float("-inf")).to(tl.float32)
    return scaled(value, peak, heat)


@triton.jit
def _survey(
    row_logits: tl.tensor,
    V: tl.tensor,
    peak: tl.tensor,
    heat: tl.tensor,
    floor: tl.tensor,
    SEARCH_TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Values from ``floor`` up, closer to each other towards the peak; tokens at or above each, and their mass. [PIVOTS]."""
    share = (PIVOTS - tl.arange(0, PIVOTS)).to(tl.float32) / PIVOTS
    pivots = floor * share * share
    counts = tl.zeros([PIVOTS, SEARCH_TILE], tl.int32)
    masses = tl.zeros([PIVOTS, SEARCH_TILE], tl.int64)
    for start in range(0, V, SEARCH_TILE):
        s = _load_scaled(row_logits, start + tl.arange(0, SEARCH_TILE), V, peak, heat)  # [SEARCH_TILE]
        reaches = s[None, :] >= pivots[:, None]  # [PIVOTS, SEARCH_TILE]
        counts += reaches.to(tl.int32)
        masses += tl.where(reaches, fixed_point(s)[None, :], 0)
    return pivots, tl.sum(counts, axis=1).to(tl.int64), tl.sum(masses, axis=1)


@triton.jit
def _shorten(
    row_logits: tl.tensor,
    short: tl.tensor,
    V: tl.tensor,
    peak: tl.tensor,
    heat: tl.tensor,
    low: tl.tensor,
    SEARCH_TILE: tl.constexpr,
) -> tl.tensor:
    """Write the scaled logits at or above ``low`` into ``short``, in the order of the vocabulary; how many they are."""
    length = tl.full((), 0, tl.int32)
    for start in range(0, V, SEARCH_TILE):
        s = _load_scaled(row_logits, start + tl.arange(0, SEARCH_TILE), V, peak, heat)  # [SEARCH_TILE]
        stays = (s >= low).to(tl.int32)
        tl.store(short + length + tl.cumsum(stays, axis=0) - 1, s, mask=stays > 0)
        length += tl.sum(stays, axis=0)
    tl.debug_barrier()  # what a thread wrote, others of the program read
    return length


@triton.jit
def _mass_from(
    short: tl.tensor, length: tl.tensor, low: tl.tensor, SEARCH_TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """How many values of a short row lie at or above ``low``, and their mass."""
    count = tl.zeros([SEARCH_TILE], tl.int64)
    mass = tl.zeros([SEARCH_TILE], tl.int64)
    for start in range(0, length, SEARCH_TILE):
        place = start + tl.arange(0, SEARCH_TILE)
        s = tl.load(short + place, mask=place < length, other=float("-inf"))  # [SEARCH_TILE]
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
    SEARCH_TILE: tl.constexpr,
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
        reach = tl.zeros([PIVOTS, SEARCH_TILE], tl.int64)
        under = tl.full([PIVOTS, SEARCH_TILE], float("-inf"), tl.float32)
        for start in range(0, length, SEARCH_TILE):
            place = start + tl.arange(0, SEARCH_TILE)
            s = tl.load(short + place, mask=place < length, other=float("-inf"))  # [SEARCH_TILE]
            amount = fixed_point(s) if BY_MASS else (s >= low).to(tl.int64)
            reaches = s[None, :] >= pivots[:, None]  # [PIVOTS, SEARCH_TILE]
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
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    peaks: tl.tensor,
    cuts: tl.tensor,
    cut_ids: tl.tensor,
    masses: tl.tensor,
    shorts: tl.tensor,
    logits_stride: tl.tensor,
    V: tl.tensor,
    num_tiles: tl.tensor,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    SEARCH_TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
) -> None:
    """The cut of row ``program_id(0)``, and masses of what it keeps, relative to the row's peak; (−inf, V) for no cut."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    peak = largest(tl.load(peaks + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf")))
    heat, k, p, least = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    start = logits + row * logits_stride
    by_k = (k > 0) & (k < V)
    cut, cut_id = heat * 0.0 + float("-inf"), V
    if (heat >= GREEDY_BELOW) & is_usable(peak) & (by_k | (p < 1.0) | (least > 0.0)):
        cut = tl.maximum(LOWEST, tl.where(least > 0.0, tl.log(tl.maximum(least, 1e-37)), float("-inf")))
        pivots, counts, amounts = _survey(start, V, peak, heat, cut, SEARCH_TILE, PIVOTS)  # [PIVOTS] each
        ties, mass = tl.max(counts, axis=0), tl.max(amounts, axis=0)  # of those that tie with the cut, all stay
        by_k = by_k & (k < ties)
        if by_k | (p < 1.0):
            enough = tl.where(by_k, counts >= k, amounts >= _goal(p, mass))
            short = shorts + row * V
            low = tl.max(tl.where(enough, pivots, cut), axis=0)
            length = _shorten(start, short, V, peak, heat, low, SEARCH_TILE)
            if by_k:
                low, above = _search(short, length, low, k, False, SEARCH_TILE, PIVOTS)
                cut, ties = low, k - above
                count, mass = _mass_from(short, length, cut, SEARCH_TILE)
                mass -= (count - k) * _mass_at(cut)
            if p < 1.0:
                goal = _goal(p, mass)
                cut, above = _search(short, length, low, goal, True, SEARCH_TILE, PIVOTS)
                ties = tl.cdiv(goal - above, _mass_at(cut))  # no more than top_k left: only their mass is in the goal
        cut_id = _keep(start, masses + row * num_tiles, V, peak, heat, cut, ties, TILE)
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
    row_logits: tl.tensor,
    row_masses: tl.tensor,
    V: tl.tensor,
    peak: tl.tensor,
    heat: tl.tensor,
    cut: tl.tensor,
    ties: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Write the mass of what is kept in each tile; give the id of the last that stays of those that tie with the cut."""
    seen = ties * 0
    last = V * 0 - 1
    for tile in range(tl.cdiv(V, TILE)):
        token = tile * TILE + tl.arange(0, TILE)
        s = _load_scaled(row_logits, token, V, peak, heat)  # [TILE]
        tied = (s == cut).to(tl.int64)
        stays = (tied > 0) & (seen + tl.cumsum(tied, axis=0) <= ties)
        tl.store(row_masses + tile, tl.sum(tl.where((s > cut) | stays, fixed_point(s), 0), axis=0))
        last = tl.maximum(last, tl.max(tl.where(stays, token, -1), axis=0))
        seen += tl.sum(tied, axis=0)
    return last
