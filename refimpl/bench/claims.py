"""The rows of the claims page: what a widely read article says makes inference fast, what we measured, and whether it holds.

A row is a :class:`Claim`; its figure is read from a result, or is arithmetic over a model's shape. Where a row names a
setting, it is the benchmark's default. :mod:`refimpl.bench.claims_page` writes the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refimpl.attention.tiles import bytes_asked_for, bytes_standard, prefill_walks
from refimpl.config import GIB, EngineArgs
from refimpl.simulate import Deployment
from refimpl.simulate.models import LLAMA_3_8B, LLAMA_3_70B
from refimpl.speculative.law import best_num_drafts, most_draft_cost, speedup

TOKEN = LLAMA_3_70B.kv_bytes_per_token(2)
"""Bytes of keys and values of one token, in 16 bits."""


@dataclass(frozen=True)
class Claim:
    """A row: the claim in our words, the topic that measures it (None: arithmetic), and how to read a result."""

    idea: str
    text: str
    topic: str | None
    judge: Callable[[dict[str, Any]], tuple[str, str]]
    """From a result's ``results`` to our figure and the verdict."""
    if_measured: bool = False
    """Whether the row is left out as long as no result of its topic is kept."""


def _verdict(holds: bool, remark: str) -> str:
    return f"{'holds' if holds else 'not reached here'}; {remark}"


def _recompute(r: dict[str, Any]) -> tuple[str, str]:
    return (
        f"at 505 to 512 tokens {r['flops_ratio']:,.0f} times the FLOPs and {r['time_ratio']:.1f} times the time",
        'holds; but "quadratic against linear" is too coarse: for one more token after n the linear layers cost n against 1 '
        "and attention n² against n, and the time gains less than the FLOPs, since a decode step reads every weight",
    )


def _token_bytes(_: dict[str, Any]) -> tuple[str, str]:
    assert TOKEN == 327_680
    return f"2 · 80 · 8 · 128 · 2 = {TOKEN:,} bytes", "holds"


def _context_bytes(_: dict[str, Any]) -> tuple[str, str]:
    one, hundred = 4_096 * TOKEN, 409_600 * TOKEN
    return (
        f"{one / 1e9:.3f} GB ({one / GIB:.2f} GiB), and {hundred / 1e9:.0f} GB for 100 requests",
        "wrong in the units: 1.28 and 128 mix KiB with thousands",
    )


def _reservations(_: dict[str, Any]) -> tuple[str, str]:
    right, wrong = 64 * 4_096 * TOKEN, 64 * 4_096 * TOKEN * 8
    return (
        f"{right / 1e9:.1f} GB ({right / GIB:.0f} GiB)",
        f"holds within {abs(right / 82e9 - 1):.0%}; but the code beside it counts 64 query heads instead of 8 for keys: "
        f"{wrong / 1e9:.0f} GB",
    )


def _outgrow(_: dict[str, Any]) -> tuple[str, str]:
    weights = LLAMA_3_70B.num_parameters * 2
    return (
        f"weights {weights / 1e9:.1f} GB; the cache is larger from {weights // TOKEN + 1:,} tokens on "
        f"({weights / TOKEN / 4096:.0f} sequences of 4,096)",
        "holds, with the numbers",
    )


def _short_reservation(_: dict[str, Any]) -> tuple[str, str]:
    return f"1 − 500/4,096 = {1 - 500 / 4096:.1%}", "holds (87.8%)"


def _trace_waste(r: dict[str, Any]) -> tuple[str, str]:
    return (
        f"contiguous: {r['contiguous']['use']:.1%} of the slot-time used",
        "holds in size: 22% is a mix of many clusters; for the lengths of the conversation trace it is more",
    )


def _blocks_of_500(_: dict[str, Any]) -> tuple[str, str]:
    return f"⌈500 / 16⌉ = {-(-500 // 16)} blocks, {-(-500 // 16) * 16 - 500} slots of them empty", "holds"


def _paged_waste(r: dict[str, Any]) -> tuple[str, str]:
    points = 100 * (r["contiguous"]["waste"] - r["paged"]["waste"])
    return (
        f"waste {r['contiguous']['waste']:.1%} → {r['paged']['waste']:.2%} of the slot-time, {points:.0f} points; "
        f"at most {r['paged']['most_wasted_slots']} slots a sequence",
        _verdict(points >= 60, "internal fragmentation is bounded by block_size − 1 slots a sequence, not abolished"),
    )


def _concurrency(r: dict[str, Any]) -> tuple[str, str]:
    paged, contiguous = r["paged"], r["contiguous"]
    return (
        f"peak {contiguous['peak_sequences']} → {paged['peak_sequences']}, on average {contiguous['mean_sequences']:.0f} → "
        f"{paged['mean_sequences']:.0f}; {contiguous['steps'] / paged['steps']:.1f} times fewer steps",
        _verdict(
            paged["peak_sequences"] >= 110 / 40 * contiguous["peak_sequences"],
            "memory use does not fall, since the pool is reserved up front: concurrency rises",
        ),
    )


def _sharing(r: dict[str, Any]) -> tuple[str, str]:
    return (
        f"n = 4 over 1,000 tokens: {r['shared_blocks']} + {r['own_blocks']} blocks instead of {r['unshared_blocks']}, "
        f"{r['copied_blocks']} copied",
        "holds",
    )


def _prefix(r: dict[str, Any]) -> tuple[str, str]:
    saved = 1_500 * TOKEN
    return (
        f"{saved / 1e6:.1f} MB ({saved / 1024**2:.0f} MiB) a request; {r['computed_tokens']} of {r['prompt_tokens']:,} "
        f"tokens computed, first token {r['ttft_ratio']:.0f} times sooner",
        "wrong by a factor of 1,024: 480 KB should be MB; that sharing pays holds",
    )


def _batching(r: dict[str, Any]) -> tuple[str, str]:
    shares = ", ".join(f"{row['ratio']:.2f} at {row['share_of_short']:.0%} short" for row in r["by_share"])
    ceilings = ", ".join(f"{row['ceiling']:.2f} at {row['share_of_short']:.0%}" for row in r["by_share"])
    return (
        f"{r['speedup']:.2f} at two thirds short, a tenth of the length; at full length, counted in steps, {shares}",
        _verdict(r["speedup"] >= 2.5, f"the ceiling is longest over mean answer: {ceilings}"),
    )


def _batching_70b(r: dict[str, Any]) -> tuple[str, str]:
    return (
        f"{r['speedup']:.2f} on 8 simulated A100-80, two thirds short, batches of 16",
        _verdict(r["speedup"] >= 2.5, f"the ceiling of this mix is {r['ceiling']:.2f}"),
    )


def _paged_throughput(r: dict[str, Any]) -> tuple[str, str]:
    static, contiguous, paged = (r["paging"][name]["throughput"] for name in r["paging"])
    return (
        f"simulated, one pool of 40 × 4,096 tokens: static and contiguous {static:,.0f}, continuous and contiguous "
        f"{contiguous:,.0f}, continuous and paged {paged:,.0f} tokens/s",
        f"{paged / static:.1f} times, if static batches are the other side; paging alone {paged / contiguous:.2f} times, "
        "as prompts of such conversations soon bind the step by arithmetic",
    )


def _table_throughput(r: dict[str, Any]) -> tuple[str, str]:
    _, quiet, loaded = r["table"].values()
    before = r["paging"]["static, contiguous"]["throughput"]
    return (
        f"simulated: static and contiguous, 40 at once, at most {before:,.0f}; continuous and paged, AWQ, "
        f"{quiet['throughput']:,.0f} at 6 requests a second and {loaded['throughput']:,.0f} at 8",
        f"holds in size, for conversations: {loaded['throughput'] / before:.1f} times instead of 3.9; 1,850 is more than "
        "their prompts leave room for",
    )


def _table_concurrency(r: dict[str, Any]) -> tuple[str, str]:
    before, quiet, loaded = r["table"].values()
    cache = EngineArgs(gpu_memory_utilization=0.92).cache_config()
    fitting = Deployment.of("llama-3-70b", "a100-80g", 8).num_blocks(cache) * cache.block_size // 4_096
    return (
        f"simulated: peak {before['concurrency_peak']}, mean {before['concurrency_mean']:.0f}; then mean "
        f"{quiet['concurrency_mean']:.0f} at 6 requests a second and {loaded['concurrency_mean']:.0f} at 8",
        "holds at 8 a second; but only a cache sized by 64 query heads holds about 40 sequences of 4,096: by the 8 heads of "
        f"keys, {fitting} fit",
    )


def _table_latency(r: dict[str, Any]) -> tuple[str, str]:
    before, quiet, loaded = r["table"].values()
    shown = (
        f"{1e3 * row['ttft_p50']:,.0f} and {1e3 * row['ttft_p99']:,.0f}, {1e3 * row['itl_p50']:.0f}"
        for row in (before, quiet, loaded)
    )
    return (
        "simulated, ms: "
        + "; ".join(f"{text} {when}" for text, when in zip(shown, ("before, at 2.3 a second", "at 6", "at 8"), strict=True)),
        "not together: a static batch makes all others wait for seconds; 210 ms are had at 6 a second with about 32 at "
        "once, not with 180; and by Little's law 180 at 22 ms "
        "would make 8,182 tokens/s, 40 at 38 ms 1,053",
    )


def _table_cost(r: dict[str, Any]) -> tuple[str, str]:
    before, after = r["paging"]["static, contiguous"], r["table"]["after, 8 a second"]
    own, article = "cost_per_million_tokens", "cost_at_the_article_s_price"
    return (
        f"simulated, under full load: ${before[own]:.2f} → ${after[own]:.2f} at ${before['price_per_gpu_hour']:.2f} an "
        f"A100-hour; ${before[article]:.2f} → ${after[article]:.2f} at $0.52",
        "holds in size if an A100-hour costs $0.52, which both of its figures imply: under half of its rent in 2026",
    )


def _flash_traffic(_: dict[str, Any]) -> tuple[str, str]:
    heads = {n: bytes_asked_for(prefill_walks(n, n, 128, 128), head_dim=128, itemsize=2) for n in (4_096, 8_192)}
    usual = bytes_standard(4_096, 4_096, head_dim=128, itemsize=2)
    return (
        f"{heads[4_096] / 1e6:.1f} MB a head at 4,096 tokens in tiles of 128, {usual / heads[4_096]:.1f} times less than "
        f"with scores in memory; {heads[8_192] / heads[4_096]:.2f} times as much at 8,192",
        "wrong: the traffic is n²d² over the on-chip memory, smaller by a factor; what is linear is the extra memory",
    )


def _latencies(r: dict[str, Any]) -> tuple[str, str]:
    rows = [(name, row) for name, row in r.items() if "not_measured" not in row]
    (slow, before), (fast, after) = rows[0], rows[-1]
    shown = [
        f"{what} {1e3 * before[figure]['p50']:.1f} → {1e3 * after[figure]['p50']:.1f} ms"
        for what, figure in (("first token", "ttft"), ("each further one", "tpot"))
    ]
    growth = [after[figure]["p50"] / before[figure]["p50"] for figure in ("ttft", "tpot")]
    return (
        f"from {slow} to {fast} arrivals a second, medians: {', '.join(shown)}",
        f"holds: the one grows {growth[0]:.1f} times, the other {growth[1]:.1f} times, and the widest gap, which neither "
        f"shows, is {1e3 * after['widest_gap']['p50']:.0f} ms",
    )


def _through_block_tables(r: dict[str, Any]) -> tuple[str, str]:
    decode = {"S": 64, "n": 1, "L": 4096, "Hq": 32, "Hkv": 8, "D": 128, "B": 16}
    [row] = [row for row in r["kernels"] if row["kernel"] == "paged_attention" and row["shape"] == decode]
    return (
        f"64 contexts of 4,096 tokens, blocks of 16 shuffled: {row['microseconds']:.0f} µs, {row['share']:.0%} of what "
        f"the memory allows; {r['peer']} takes {row['peer_microseconds']:.0f} µs",
        _verdict(row["share"] >= 0.9, "the block table hardly shows: 4 bytes of it lead to 65,536 of keys and values"),
    )


def _draft_of_8b(_: dict[str, Any]) -> tuple[str, str]:
    goal, c = 2.3, LLAMA_3_8B.num_parameters / (LLAMA_3_70B.num_parameters / 2)  # bytes in 16 bits over those in 8
    K = max(range(1, 9), key=lambda drafts: most_draft_cost(0.75, drafts, goal))
    best = best_num_drafts(0.75, c)
    return (
        f"needs c ≤ {most_draft_cost(0.75, K, goal):.3f}, at {K} drafts and a check that costs no more than a step; 16 bits "
        f"of 8B over 8 bits of 70B are c = {c:.2f}, which is {speedup(0.75, best, c):.2f} times at {best} drafts",
        "wrong for a draft of that size: it takes one of a billion weights, or a small head",
    )


def _drafts_measured(r: dict[str, Any]) -> tuple[str, str]:
    def told(name: str) -> str:
        rung = r[name]["rungs"][str(r[name]["best"])]
        return f"{rung['measured']:.2f} times at {r[name]['best']} drafts (c = {rung['c']:.2f})"

    return (
        f"one request, the shapes in FP8 with drafts accepted by chance at 75%: {told('draft_8b')} with an 8B draft in 16 "
        f"bits, {told('draft_1b')} with a 1B one",
        "wrong for a draft of 8B, and more than reached with one of 1B, as the law says",
    )


def _under_60(_: dict[str, Any]) -> tuple[str, str]:
    c = 0.05
    figures = (f"{speedup(alpha, best_num_drafts(alpha, c), c):.2f} times at {alpha:.0%}" for alpha in (0.6, 0.5, 0.4))
    return (
        f"with c = {c} and a check that costs no more than a step: {', '.join(figures)}",
        "wrong: one draft pays from an acceptance of c on, as 1 + α > 1 + c; at large batches it is the check that costs",
    )


CLAIMS = [
    Claim(
        "KV cache",
        "Without a cache each step recomputes all keys and values; with one, a step is linear",
        "recompute",
        _recompute,
    ),
    Claim("its price", "Llama-3-70B in 16 bits: 327,680 bytes a token", None, _token_bytes),
    Claim("its price", "1.28 GB at 4,096 tokens, 128 GB for 100 requests", None, _context_bytes),
    Claim("its price", "The cache outgrows the 140 GB of weights", None, _outgrow),
    Claim("contiguous allocation", "64 sequences of 4,096 take about 82 GB", None, _reservations),
    Claim("contiguous allocation", "At 500 of 4,096 tokens 87% of a reservation is wasted", None, _short_reservation),
    Claim("contiguous allocation", "Clusters use 22% of the memory reserved", "memory", _trace_waste),
    Claim("PagedAttention", "500 tokens are 32 blocks of 16", None, _blocks_of_500),
    Claim("PagedAttention", "Waste falls by 60 to 70 points", "memory", _paged_waste),
    Claim("PagedAttention", "40 → 110 concurrent requests in the same memory", "memory", _concurrency),
    Claim("PagedAttention", "Parallel samples share blocks, and copy on write", "sharing", _sharing),
    Claim("prefix caching", "A shared prefix of 1,500 tokens saves 480 KB a request", "sharing", _prefix),
    Claim("continuous batching", "2.8 times on a mix of answers of 50 and 2,000 tokens", "batching", _batching),
    Claim("continuous batching", "The same for a model of 70 billion weights", "simulate", _batching_70b),
    Claim("FlashAttention", "Memory traffic is linear rather than quadratic", None, _flash_traffic),
    Claim("FlashAttention", "A fused kernel reads keys through the block table", "kernels", _through_block_tables),
    Claim("PagedAttention", "480 → 1,340 tokens/s on the same hardware", "simulate", _paged_throughput),
    Claim("the table", "8 × A100-80, 70B: 480 → 1,850 tokens/s", "simulate", _table_throughput),
    Claim("the table", "40 → 180 at once", "simulate", _table_concurrency),
    Claim("the table", "First token 820 → 210 ms (p99 4,200 → 890), between tokens 38 → 22", "simulate", _table_latency),
    Claim("the table", "$2.40 → $0.62 a million tokens", "simulate", _table_cost),
    Claim("tips", "Measure the time to the first token apart from the time between tokens", "serve_sim", _latencies, True),
    Claim("speculative decoding", "70B with an 8B draft at 75% acceptance: 2.3 times", None, _draft_of_8b),
    Claim("speculative decoding", "the same, measured", "speculation_shape", _drafts_measured, if_measured=True),
    Claim("speculative decoding", "Under 60% acceptance it never pays", None, _under_60),
]
