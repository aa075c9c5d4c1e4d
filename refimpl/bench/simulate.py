"""The simulator held against measurements, and a 70B model on eight A100s that nobody rents: batching, paging, a table.

The lengths of paging and of the table are those of real conversations (``bench.traces``), at most 4,096 tokens together.
"""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from refimpl.bench import measured
from refimpl.bench.batching import ceiling
from refimpl.bench.result import Result, check, setting, workload_hash
from refimpl.bench.traces import generate
from refimpl.config import EngineArgs
from refimpl.simulate import Deployment, Simulation, TraceRequest, arrive, mixed

MAX_MODEL_LEN, BLOCK_SIZE, RESERVATIONS = 4_096, 16, 40
POOL = RESERVATIONS * MAX_MODEL_LEN // BLOCK_SIZE
"""Blocks of a pool that holds 40 contiguous sequences of 4,096 tokens, as the article's did."""
BATCH, MIXED = 16, 240
ARTICLE_PRICE = 0.52
"""US dollars for an A100 and hour, which both of the article's costs imply: 2.40 · 480 · 3600 / 8 / 1e6 and likewise."""
CONTIGUOUS = {"num_gpu_blocks_override": POOL, "kv_cache_manager": "contiguous"}
PRODUCTION = {"max_num_batched_tokens": 32_768, "max_num_seqs": 256, "gpu_memory_utilization": 0.92}
"""The article's settings, as far as they exist."""
TABLE: dict[str, tuple[str, float, dict[str, Any]]] = {
    "before": ("bfloat16", 480 / 211, CONTIGUOUS | {"scheduler": "static", "max_num_seqs": RESERVATIONS}),
    "after, 6 a second": ("awq", 6.0, PRODUCTION),
    "after, 8 a second": ("awq", 8.0, PRODUCTION),
}
"""Weights, requests a second, options. The first load is what 480 tokens/s need; at the third about 180 run at once."""
PAGING: dict[str, dict[str, Any]] = {
    "static, contiguous": CONTIGUOUS | {"scheduler": "static", "max_num_seqs": RESERVATIONS},
    "continuous, contiguous": CONTIGUOUS,
    "continuous, paged": {"num_gpu_blocks_override": POOL},
}


def run(requests: int = 1_500, seed: int = 0) -> Result:
    """Everything; ``requests`` conversations for paging and for each row of the table."""
    chats = [chat for chat in generate("conv", requests, seed) if chat.prompt + chat.output <= MAX_MODEL_LEN]
    runs = [_against(one) for one in tqdm(measured.RUNS, desc="measured sets", leave=False)]
    poisson = [_against_poisson(one) for one in tqdm(measured.POISSON_RUNS, desc="measured arrivals", leave=False)]
    answers = mixed("short-long", MIXED, seed)
    batching = {
        kind: _simulate(answers, scheduler=kind, max_num_seqs=BATCH)
        for kind in tqdm(("static", "continuous"), desc="batching", leave=False)
    }
    at_once = arrive(chats, float("inf"), seed)
    paging = {
        name: _simulate(at_once, max_model_len=MAX_MODEL_LEN, **options)
        for name, options in tqdm(PAGING.items(), desc="paging", leave=False)
    }
    table = {
        name: _simulate(arrive(chats, rate, seed), dtype, max_model_len=MAX_MODEL_LEN, **options)
        for name, (dtype, rate, options) in tqdm(TABLE.items(), desc="table", leave=False)
    }
    speedup = batching["static"]["seconds"] / batching["continuous"]["seconds"]
    most = ceiling([(answer.prompt, answer.output) for answer in answers])
    return Result(
        topic="simulate",
        setting=setting(
            model="no model",
            model_hash="none",
            dtype="integers",
            workload=f"Llama-3-70B on 8 × A100-80, simulated: {len(chats):,} conversations of at most {MAX_MODEL_LEN:,} "
            f"tokens, and {MIXED} answers of which two thirds have 50 tokens and the rest 2,000",
            workload_hash=workload_hash([(chat.prompt, chat.output) for chat in chats]),
            tokens_produced=sum(figures["output_tokens"] for side in (batching, paging, table) for figures in side.values()),
        ),
        results={
            "against_measured": {"runs": runs, "poisson": poisson},
            "batching": batching,
            "speedup": speedup,
            "ceiling": most,
            "paging": paging,
            "table": table,
        },
        checks=[
            check("error_of_fitted_runs", _worst(row for row in runs if row["fitted"]), "<=", 0.06),
            check("error_of_other_runs", _worst(row for row in runs if not row["fitted"]), "<=", 0.19),
            check(
                "error_of_other_runs_over_100_ms",
                _worst(r for r in runs if not r["fitted"] and r["measured"] > 0.1),
                "<=",
                0.11,
            ),
            check("error_of_ttft_p50", max(abs(row["ttft_p50_error"]) for row in poisson), "<=", 0.12),
            check("continuous_over_static_70b", speedup, ">=", 2.5),
            check("continuous_over_static_70b_at_most", speedup, "<=", 1.02 * most),
            check("paged_over_contiguous_concurrency", _ratio(paging, "concurrency_peak"), ">=", 110 / 40),
        ],
    )


def _ratio(paging: dict[str, dict[str, Any]], name: str) -> float:
    return float(paging["continuous, paged"][name] / paging["continuous, contiguous"][name])


def _worst(rows: Any) -> float:
    return max(abs(float(row["error"])) for row in rows)


def _simulate(listed: list[TraceRequest], dtype: str = "bfloat16", **options: Any) -> dict[str, Any]:
    args = EngineArgs(enable_prefix_caching=False, event_log_size=0, **options)
    figures = Simulation(args, Deployment.of("llama-3-70b", "a100-80g", 8, dtype), listed).run()
    cost = figures["cost_per_million_tokens"] * ARTICLE_PRICE / figures["price_per_gpu_hour"]
    return figures | {"cost_at_the_article_s_price": cost}


def _as_measured(model: str, dtype: str, blocks: int, workload: str) -> dict[str, Any]:
    args = EngineArgs(
        enable_prefix_caching=False,
        event_log_size=0,
        max_num_seqs=measured.SEQUENCES,
        max_num_batched_tokens=measured.BATCHED_TOKENS,
        num_gpu_blocks_override=blocks,
    )
    return Simulation(args, Deployment.of(model, "h200", 1, dtype), measured.requests(workload)).run()


def _against(one: measured.Run) -> dict[str, Any]:
    seconds = _as_measured(one.model, one.dtype, one.blocks, one.workload)["seconds"]
    return {
        "run": f"{one.model} {one.dtype} {one.workload}",
        "measured": one.seconds,
        "simulated": seconds,
        "error": seconds / one.seconds - 1,
        "fitted": one.fitted,
    }


def _against_poisson(one: measured.PoissonRun) -> dict[str, Any]:
    first = measured.RUNS[0]
    figures = _as_measured(first.model, first.dtype, first.blocks, f"poisson-{one.rate}")
    row: dict[str, Any] = {"rate": one.rate}
    for name, seconds in (("ttft_p50", one.ttft[0]), ("ttft_p99", one.ttft[2]), ("tpot_p50", one.tpot[0])):
        row |= {name: figures[name], f"{name}_measured": seconds, f"{name}_error": figures[name] / seconds - 1}
    return row
