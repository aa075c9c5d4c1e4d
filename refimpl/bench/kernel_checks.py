"""What the kernels' figures are held to: the memory's ceiling, a copy's, FlashAttention's and a library's
where they are beside them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from refimpl.bench.result import Check, check

Row = Mapping[str, Any]
LARGE = 10**9
"""Bytes from which on a decode's attention is long enough to be held against the ceiling alone."""
MOVERS = frozenset(
    [
        "rms_norm",
        "add_rms_norm",
        "silu_mul",
        "rotary",
        "write_kv",
        "turn_and_write_kv",
        "copy_blocks",
        "gather_blocks",
        "scatter_blocks",
    ]
)
"""Kernels that do little but move numbers."""
MOVED = 6 * 10**7
"""Bytes from which on they are held against a copy of as many bytes: less than the keys of 8,192 tokens."""

IN_4_BITS = frozenset(["awq_linear"])
"""Kernels that are measured beside a library's product with weights in 16 bits."""
LARGE_MATRICES = ((57344, 8192), (8192, 28672))
"""(outputs, inputs) of Llama-3-70B's feed-forward, which the checks of 4-bit weights are about."""


def checks_of(rows: list[dict[str, Any]]) -> list[Check]:
    """The checks for which there are rows."""
    copied = [row["copy_microseconds"] / row["microseconds"] for row in rows if "copy_microseconds" in row]
    moving = [check("moving_kernels_over_copy", min(copied), ">=", 0.9)] if copied else []
    peers = _peer_checks([row for row in rows if "peer_microseconds" in row])
    return _attention_checks(rows) + peers + moving + _four_bit_checks(rows)


def _attention_checks(rows: list[dict[str, Any]]) -> list[Check]:
    """Decodes over a gigabyte, which nothing but the memory should hold up; a prompt of 16,384 tokens."""
    shares = [row["share"] for row in rows if row["kernel"] == "paged_attention" and row["bytes"] >= LARGE]
    found = [check("decode_attention_share", min(shares), ">=", 0.9)] if shares else []
    for row in rows:
        shape = row["shape"]
        if row["kernel"] == "flash_attention" and (shape["n"], shape["L"], shape["Hkv"]) == (16384, 16384, 8):
            found.append(check("prefill_tflops", row["flops"] / row["microseconds"] / 1e6, ">=", 400))
    return found


def _four_bit_checks(rows: list[dict[str, Any]]) -> list[Check]:
    """Shares of what the memory allows, and times of a library's product in 16 bits over ours."""
    large = [
        row
        for row in rows
        if row["kernel"] in IN_4_BITS and (row["shape"]["out_features"], row["shape"]["in_features"]) in LARGE_MATRICES
    ]
    found = []
    for tokens, share, times in ((1, 0.75, 2.8), (16, 0.65, None)):
        those = [row for row in large if row["shape"]["T"] == tokens]
        if those:
            found.append(check(f"four_bits_share_{tokens}", min(row["share"] for row in those), ">=", share))
        if those and times is not None:
            faster = min(row["library_microseconds"] / row["microseconds"] for row in those)
            found.append(check(f"four_bits_over_16_{tokens}", faster, ">=", times))
    return found


def _peer_checks(rows: list[dict[str, Any]]) -> list[Check]:
    """Times of FlashAttention over ours: above 1, ours is the faster one."""
    decodes = [row for row in rows if row["kernel"] == "paged_attention" and row["shape"]["n"] == 1]
    small = [_times(row) for row in decodes if row["shape"]["S"] in (1, 8) and row["shape"]["Hkv"] == 8]
    large = [_times(row) for row in decodes if row["bytes"] >= LARGE]
    narrow = [_times(row) for row in decodes if (row["shape"]["S"], row["shape"]["L"], row["shape"]["Hkv"]) == (64, 4096, 1)]
    prefills = [_times(row) for row in rows if row["kernel"] == "flash_attention" and row["shape"]["Hkv"] == 8]
    found = []
    if small:
        mean = math.prod(small) ** (1 / len(small))
        found.append(check("small_decodes_over_flash_attention", mean, ">=", 1.0))
        found.append(check("least_small_decode_over_flash_attention", min(small), ">=", 0.9))
    for name, values, bound in (
        ("large_decodes_over_flash_attention", large, 0.97),
        ("one_kv_head_over_flash_attention", narrow, 1.0),
        ("prefills_over_flash_attention", prefills, 0.6),
    ):
        if values:
            found.append(check(name, min(values), ">=", bound))
    return found


def _times(row: Row) -> float:
    return float(row["peer_microseconds"] / row["microseconds"])
