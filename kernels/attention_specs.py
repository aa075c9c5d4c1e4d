"""The attention kernels as the registry knows them: their definition, inputs, tolerance, bounds, and what is compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from refimpl.kernels import attention_cases
from refimpl.kernels.attention_tiles import operand, padded
from refimpl.kernels.flash_attention import flash_attention, plan_prefill, prefill_kernel, prefill_tiles
from refimpl.kernels.launch import dtypes_for, pointer
from refimpl.kernels.overlap import OVERLAPS_FROM
from refimpl.kernels.paged_attention import (
    HEADS_AT_ONCE,
    decode_kernel,
    decode_tiles,
    merge_kernel,
    paged_attention,
    plan_decode,
    splits_at_once,
)
from refimpl.kernels.spec import Case, Compile, KernelSpec, Shape
from refimpl.kernels.split_plan import FEWEST, MERGE, START, WAVES, WEIGHED, SplitPlan, plan_kernel

TOKEN_LISTS = ("cu_seqlens_q", "seqused_k")
MISTRALS_WINDOW = 4096
STRIDES = ("token_stride", "query_head_stride", "table_stride", "block_stride", "slot_stride", "head_stride")


def launch_decode(query: Tensor, max_seqlen_q: int, window: int | None, plan: SplitPlan, out: Tensor, **rest: Any) -> Tensor:
    """The kernels, by a plan that was made beforehand, once for all layers of a step that have this window."""
    return paged_attention(query, plan=plan, out=out, **rest)


def make_decode_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    """A step's inputs, and the plan of its splits."""
    case = attention_cases.make_case(shape, dtype, device, seed)
    lengths = (case.inputs["cu_seqlens_q"], case.inputs["seqused_k"])
    most = case.inputs["block_table"].shape[1] * shape["B"]
    heads = (shape["Hq"], shape["Hkv"], shape["D"])
    plan = plan_decode(*heads, dtype, *lengths, case.inputs["max_seqlen_q"], most, window=case.inputs["window"])
    return Case(case.inputs, case.out | {"plan": plan})


def launch_prefill(query: Tensor, max_seqlen_q: int, plan: Tensor, out: Tensor, **rest: Any) -> Tensor:
    """The kernel, by a plan that the host made beforehand, once for all layers of a step."""
    return flash_attention(query, plan=plan, out=out, **rest)


def make_prefill_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    """A step's inputs, and the plan of its tiles."""
    case = attention_cases.make_case(shape, dtype, device, seed)
    query_lens, context_lens = zip(*attention_cases.lens(shape), strict=True)
    plan = plan_prefill(shape["D"], dtype, list(query_lens), list(context_lens), device)
    return Case(case.inputs, case.out | {"plan": plan})


def compile_decode(target: int, dtype: torch.dtype, D: int, Hq: int, Hkv: int, queries: int, window: int = 0) -> Compile:
    """The decode kernel as it is launched for a model's heads, block size 16."""
    tiles = decode_tiles(target, D, queries * Hq // Hkv, dtype)
    signature = (
        dict.fromkeys(("out", "query", "k_cache", "v_cache"), pointer(dtype))
        | dict.fromkeys(("split_out", "split_lse"), "*fp32")
        | dict.fromkeys(("block_table", *TOKEN_LISTS, "items"), "*i32")
        | {"scale_log2": "fp32"}
        | dict.fromkeys(STRIDES, "i32")
    )
    sizes = {
        "HEADS": Hq, "GROUP": Hq // Hkv, "MAX_QUERIES": queries, "BLOCK_SIZE": 16, "HEAD_DIM": D,
        "TILE_M": tiles.tile_m, "TILE_N": tiles.tile_n, "TILE_D": padded(D),
        "OPERAND": operand(dtype, tiles.vector), "VECTOR": tiles.vector, "WINDOW": window,
        "OVERLAP": target >= OVERLAPS_FROM,
    }  # fmt: skip
    label = f"D={D} {Hq}/{Hkv} n={queries}" + (f" window={window}" if window else "")
    return Compile(decode_kernel, signature, sizes, tiles.num_warps, tiles.num_stages, frozenset({"table_stride"}), label)


def compile_prefill(target: int, dtype: torch.dtype, D: int, Hq: int, Hkv: int, window: int = 0) -> Compile:
    """The prefill kernel as it is launched for a model's heads, block size 16."""
    tiles = prefill_tiles(target, D, dtype)
    signature = (
        dict.fromkeys(("out", "query", "k_cache", "v_cache"), pointer(dtype))
        | dict.fromkeys(("block_table", *TOKEN_LISTS, "tiles"), "*i32")
        | {"scale_log2": "fp32"}
        | dict.fromkeys(STRIDES, "i32")
    )
    sizes = {
        "HEADS": Hq, "GROUP": Hq // Hkv, "BLOCK_SIZE": 16, "HEAD_DIM": D, "TILE_M": tiles.tile_m, "TILE_N": tiles.tile_n,
        "TILE_D": padded(D), "OPERAND": operand(dtype), "WINDOW": window,
    }  # fmt: skip
    label = f"D={D} {Hq}/{Hkv}" + (f" window={window}" if window else "")
    return Compile(prefill_kernel, signature, sizes, tiles.num_warps, tiles.num_stages, frozenset({"table_stride"}), label)


def decode_compiles(target: int) -> tuple[Compile, ...]:
    """What decode attention is compiled for: Llama-3-8B everywhere, other sizes where they differ most."""
    dtype = dtypes_for(target)[0]
    numbers = ("num_sequences", "num_items", "one_wave")
    plan = Compile(
        plan_kernel,
        dict.fromkeys(("items", "splits", *TOKEN_LISTS), "*i32") | dict.fromkeys(numbers, "i32"),
        {
            "MAX_QUERIES": 1,
            "TILE_N": 64,
            "FEWEST": FEWEST,
            "WAVES": WAVES,
            "START": START,
            "MERGE": MERGE,
            "WEIGHED": WEIGHED,
            "SEQUENCES": 256,
            "CHUNK": 32,
            "WINDOW": 0,
        },
        unaligned=frozenset(numbers),
        label="plan",
    )
    merge = Compile(
        merge_kernel,
        {"out": pointer(dtype), "split_out": "*fp32", "split_lse": "*fp32", "cu_seqlens_q": "*i32", "splits": "*i32"},
        {
            "HEADS": 32,
            "MAX_QUERIES": 1,
            "HEAD_DIM": 128,
            "TILE_D": 128,
            "TILE_H": HEADS_AT_ONCE,
            "AT_ONCE": splits_at_once(128),
            "OVERLAP": target >= OVERLAPS_FROM,
        },
        label="merge",
    )
    more: dict[int, list[tuple[int, ...]]] = {
        80: [(80, 32, 32, 1)],
        90: [(128, 8, 1, 16), (256, 8, 4, 1), (128, 32, 8, 1, MISTRALS_WINDOW)],
    }
    shapes = [(128, 32, 8, 1), *more.get(target, [])]
    return (plan, merge, *(compile_decode(target, dtype, *shape) for shape in shapes))


def prefill_compiles(target: int) -> tuple[Compile, ...]:
    """What prefill attention is compiled for."""
    if target < 80:
        return ()
    more: dict[int, list[tuple[int, ...]]] = {80: [(80, 32, 32)], 90: [(256, 8, 4), (128, 32, 8, MISTRALS_WINDOW)]}
    shapes = [(128, 32, 8), *more.get(target, [])]
    return tuple(compile_prefill(target, dtypes_for(target)[0], *shape) for shape in shapes)


def _served(*lens: tuple[int, int, int]) -> tuple[Shape, ...]:
    """(sequences, queries, context) with the heads of Llama-3-8B, and of one of 8 GPUs' share of Llama-3-70B."""
    return tuple(
        {"S": S, "n": n, "L": L, "Hq": Hq, "Hkv": Hkv, "D": 128, "B": 16}
        for Hq, Hkv in ((32, 8), (8, 1))
        for S, n, L in lens
    )


def _windowed(*lens: tuple[int, int, int]) -> tuple[Shape, ...]:
    """The same with the heads and the window of Mistral-7B."""
    return tuple({**shape, "window": MISTRALS_WINDOW} for shape in _served(*lens)[: len(lens)])


SPECS = (
    KernelSpec(
        name="paged_attention",
        summary="attention of up to 16 queries a sequence over its pages",
        axes=attention_cases.AXES,
        twin=attention_cases.twin,
        launch=launch_decode,
        outputs=("out",),
        make_case=make_decode_case,
        small_shapes=(
            {"S": 6, "n": 1, "L": 70, "Hq": 2, "Hkv": 1, "D": 64, "B": 8, "ragged": 1},
            {"S": 1, "n": 16, "L": 64, "Hq": 1, "Hkv": 1, "D": 64, "B": 16},
            {"S": 1, "n": 1, "L": 64, "Hq": 9, "Hkv": 3, "D": 64, "B": 16, "gap": 3},
            {"S": 1, "n": 1, "L": 70, "Hq": 7, "Hkv": 1, "D": 80, "B": 32},
            {"S": 2, "n": 1, "L": 70, "Hq": 6, "Hkv": 1, "D": 96, "B": 64, "gap": 8},
            {"S": 1, "n": 1, "L": 20, "Hq": 8, "Hkv": 8, "D": 128, "B": 8, "block_gap": 2**30},
            {"S": 1, "n": 2, "L": 33, "Hq": 4, "Hkv": 2, "D": 256, "B": 16},
            {"S": 6, "n": 3, "L": 150, "Hq": 2, "Hkv": 1, "D": 64, "B": 8, "ragged": 1, "window": 9},
        ),
        device_shapes=_served(
            *((S, 1, L) for S in (1, 8) for L in (1024, 4096, 16384)), (64, 1, 1024), (64, 1, 4096), (64, 5, 1024)
        )
        + _windowed((8, 1, 16384), (64, 1, 16384)),
        tolerance=attention_cases.TOLERANCES,
        bytes_moved=attention_cases.bytes_moved,
        flops=attention_cases.flops,
        compiles=decode_compiles,
    ),
    KernelSpec(
        name="flash_attention",
        summary="attention of many queries a sequence, the last of its context, over its pages",
        axes=attention_cases.AXES,
        twin=attention_cases.twin,
        launch=launch_prefill,
        outputs=("out",),
        make_case=make_prefill_case,
        small_shapes=(
            {"S": 6, "n": 9, "L": 40, "Hq": 2, "Hkv": 1, "D": 64, "B": 8, "ragged": 1},
            {"S": 1, "n": 16, "L": 64, "Hq": 9, "Hkv": 3, "D": 64, "B": 16, "gap": 3},
            {"S": 1, "n": 130, "L": 150, "Hq": 1, "Hkv": 1, "D": 80, "B": 32},
            {"S": 1, "n": 20, "L": 20, "Hq": 6, "Hkv": 1, "D": 96, "B": 64, "gap": 8},
            {"S": 1, "n": 2, "L": 20, "Hq": 8, "Hkv": 8, "D": 128, "B": 8, "block_gap": 2**30},
            {"S": 1, "n": 33, "L": 33, "Hq": 1, "Hkv": 1, "D": 256, "B": 16},
            {"S": 6, "n": 9, "L": 90, "Hq": 2, "Hkv": 1, "D": 64, "B": 8, "ragged": 1, "window": 9},
        ),
        device_shapes=_served((1, 4096, 4096), (16, 1024, 1024), (1, 2048, 16384)) + _windowed((1, 2048, 16384)),
        timed_shapes=_served((1, 16384, 16384)),
        tolerance=attention_cases.TOLERANCES,
        bytes_moved=attention_cases.bytes_moved,
        flops=attention_cases.flops,
        compiles=prefill_compiles,
        not_on={75: "Triton has no tensor-core products there; torch's attention on gathered pages serves prefills"},
    ),
)
