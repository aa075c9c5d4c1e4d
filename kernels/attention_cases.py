"""Inputs of the attention kernels: random block tables over a pool that is NaN wherever nobody wrote."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from refimpl.kernels import cases, reference
from refimpl.kernels.spec import Case, Shape, Tolerance

AXES = ("S", "n", "L", "Hq", "Hkv", "D", "B", "ragged", "gap", "block_gap", "window")
"""``n`` queries a sequence, ``L`` keys; ``ragged``: lengths around the block's instead; ``gap`` elements lie between query
heads, ``block_gap`` between blocks; a query sees ``window`` keys."""


def lens(shape: Shape) -> list[tuple[int, int]]:
    """(queries, context) of each sequence. A padded row of a step has one query and no context."""
    S, n, L, B = shape["S"], shape["n"], shape["L"], shape["B"]
    lengths = [0, 1, B - 1, B, B + 1, L] if shape.get("ragged") else [L]
    contexts = [lengths[s % len(lengths)] for s in range(S)]
    return [(max(1, min(n, context)), context) for context in contexts]


def make_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    """A step's queries, keys and values from Normal(0, 1)."""
    Hq, Hkv, D, B = shape["Hq"], shape["Hkv"], shape["D"], shape["B"]
    random = cases.generator(seed)
    sequences = lens(shape)
    query_lens, contexts = [n for n, _ in sequences], [context for _, context in sequences]
    blocks = [-(-context // B) for context in contexts]
    order = torch.randperm(sum(blocks), generator=random).int() + 1  # block 0 is nobody's, and NaN
    table = torch.zeros(len(blocks), max(1, *blocks), dtype=torch.int32)
    pools = [
        cases.poisoned_pool(sum(blocks) + 1, B, Hkv, D, dtype, device, shape.get("block_gap", 0)) for _ in ("keys", "values")
    ]
    for s, own in enumerate(order.split(blocks)):
        table[s, : blocks[s]] = own
        for pool in pools if len(own) else ():
            _fill(pool, own, cases.normal(contexts[s], Hkv, D, dtype=dtype, device=device, random=random))
    query = cases.normal(sum(query_lens), Hq, D, dtype=dtype, device=device, random=random, gap=shape.get("gap", 0))
    inputs = {
        "query": query,
        "k_cache": pools[0],
        "v_cache": pools[1],
        "block_table": table.to(device),
        "cu_seqlens_q": torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        "seqused_k": torch.tensor(contexts, dtype=torch.int32, device=device),
        "softmax_scale": D**-0.5,
        "max_seqlen_q": max(query_lens),
        "window": shape.get("window"),
    }
    return Case(inputs, {"out": cases.poisoned(*query.shape, dtype=dtype, device=device)})


def _fill(pool: Tensor, block_ids: Tensor, rows: Tensor) -> None:
    """``rows [L, Hkv, D]`` into the first L slots of some blocks; the slots behind them stay NaN."""
    padding = len(block_ids) * pool.shape[1] - len(rows)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, padding), value=math.nan)
    pool[block_ids.long().to(pool.device)] = padded.unflatten(0, (len(block_ids), pool.shape[1]))


def twin(query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, **rest: Tensor) -> Tensor:
    """The definition, without the bound that a launch takes."""
    rest.pop("max_seqlen_q")
    return reference.paged_attention(query, k_cache, v_cache, block_table, **rest)  # type: ignore[arg-type]


def bytes_moved(shape: Shape, dtype: torch.dtype) -> int:
    """Keys and values of every context, or of what its queries' windows reach over, once; queries and outputs once."""
    sequences = lens(shape)
    window = shape.get("window", 2**31)
    keys, queries = sum(min(context, window + n - 1) for n, context in sequences), sum(n for n, _ in sequences)
    return 2 * (keys * shape["Hkv"] + queries * shape["Hq"]) * shape["D"] * dtype.itemsize


def flops(shape: Shape, dtype: torch.dtype) -> int:
    """Two products of ``2 · D`` each for every query head and every key that it sees."""
    seen = sum(n * context - n * (n - 1) // 2 for n, context in lens(shape) if context)
    if window := shape.get("window"):
        seen = sum(min(place + 1, window) for n, context in lens(shape) for place in range(context - n, context) if context)
    return 4 * shape["D"] * shape["Hq"] * seen


TOLERANCES = {
    torch.float32: Tolerance(2e-5, 4e-6, "the order of sums, exp2 of scores that carry float32's rounding"),
    torch.bfloat16: Tolerance(
        2.0**-7, 6 * 2.0**-9, "weights rounded to bfloat16 before the product with values up to 5, and the output rounded"
    ),
    torch.float16: Tolerance(
        2.0**-10, 6 * 2.0**-12, "weights rounded to float16 before the product with values up to 5, and the output rounded"
    ),
}
