"""RMSNorm of every head of the queries and of the keys, in place, between their projection and the rotary embedding.

::

    heads of token t:  [ query heads │ key heads │ value heads ]      each head [D] / rms · weight [D]
                          q_weight      k_weight    not touched       rms = √(mean of squares + eps)

The heads of a token lie side by side in what the projection gave, so those of queries and keys are no matrix whose rows are
equally far apart, which :mod:`refimpl.kernels.rms_norm` would take. A program takes up to ``HEADS`` heads of one token, all
of one kind, and writes them where they were: one launch for both norms and no copy. Bound by memory: every element is read
and written once.

The quotient is rounded to the heads' dtype before it is multiplied by the weight, as in Hugging Face's Qwen3. Source: Henry
et al. 2020, "Query-Key Normalization for Transformers".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels import cases, reference
from refimpl.kernels.launch import check_last_axis, check_same, device_of, dtypes_for, pointer, power_of_two
from refimpl.kernels.overlap import OVERLAPS_FROM, after_previous, overlapping
from refimpl.kernels.spec import Case, Compile, KernelSpec, Shape, Tolerance

HEADS = 8
"""Heads a program takes at most: of 128 numbers, 8 of them are 8 numbers a thread."""
NUM_WARPS = 4


@triton.jit
def norm_heads_kernel(
    heads: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    D: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One tile of token ``program_id(0)``: heads of queries while there are any, then heads of keys."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_tiles = tl.cdiv(num_heads, HEADS)
    element = tl.arange(0, WIDTH)
    is_query = tile < query_tiles
    if is_query:
        scale = tl.load(q_weight + element, mask=element < D, other=0.0).to(tl.float32)  # [WIDTH]
    else:
        scale = tl.load(k_weight + element, mask=element < D, other=0.0).to(tl.float32)
    first = tl.where(is_query, tile * HEADS, num_heads + (tile - query_tiles) * HEADS)
    end = tl.where(is_query, num_heads, num_heads + num_kv_heads)
    head = (first + tl.arange(0, HEADS))[:, None]  # [HEADS, 1]
    inside = (head < end) & (element < D)[None, :]
    place = heads + token * token_stride + head * head_stride + element[None, :]
    after_previous(OVERLAP)
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)  # [HEADS, WIDTH]
    root = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)
    quotient = (value * root[:, None]).to(heads.dtype.element_ty).to(tl.float32)
    tl.store(place, (quotient * scale[None, :]).to(heads.dtype.element_ty), mask=inside)


def norm_heads(heads: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, num_heads: int) -> Tensor:
    """:func:`reference.norm_heads` of ``heads [T, Hq + Hkv, D]``, the first ``num_heads`` of them queries'; in place.

    Mutates ``heads``, and gives it back. Tokens and heads may lie apart.

    Raises:
        RefimplError: elements of a head lie apart, or sizes differ.

    """
    T, count, D = heads.shape
    check_last_axis(heads=heads, q_weight=q_weight, k_weight=k_weight)
    check_same("sizes of a head", heads=D, q_weight=len(q_weight), k_weight=len(k_weight))
    if T:
        num_kv_heads = count - num_heads
        at_once = min(HEADS, power_of_two(max(num_heads, num_kv_heads)))
        sizes = (num_heads, num_kv_heads, D)
        with device_of(heads):
            norm_heads_kernel[(T, triton.cdiv(num_heads, at_once) + triton.cdiv(num_kv_heads, at_once))](
                heads, q_weight, k_weight, *heads.stride()[:2], *sizes, eps,
                HEADS=at_once, WIDTH=power_of_two(D), num_warps=NUM_WARPS, **overlapping(heads),
            )  # fmt: skip
    return heads


# ---------------------------------------------------------------------- what is registered

EPS = 1e-6


def _case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    T, Hq, Hkv, D, gap = shape["T"], shape["Hq"], shape["Hkv"], shape["D"], shape.get("gap", 0)
    random = cases.generator(seed)
    heads = cases.normal(T, Hq + Hkv, D, dtype=dtype, device=device, random=random, scale=3.0, gap=gap)
    weights = [cases.normal(D, dtype=dtype, device=device, random=random) for _ in range(2)]
    return Case({"heads": heads, "q_weight": weights[0], "k_weight": weights[1], "eps": EPS, "num_heads": Hq})


def _compiles(capability: int) -> tuple[Compile, ...]:
    """For the heads of Qwen3-8B."""
    dtype = dtypes_for(capability)[0]
    integers = ("token_stride", "head_stride", "num_heads", "num_kv_heads", "D")
    signature = dict.fromkeys(("heads", "q_weight", "k_weight"), pointer(dtype)) | dict.fromkeys(integers, "i32")
    sizes = {"HEADS": HEADS, "WIDTH": 128, "OVERLAP": capability >= OVERLAPS_FROM}
    loose = frozenset({"num_heads", "num_kv_heads"})
    return (Compile(norm_heads_kernel, signature | {"eps": "fp32"}, sizes, NUM_WARPS, unaligned=loose, label="D=128 32/8"),)


_ROUNDINGS = "the quotient and the product rounded to the dtype"

SPECS = (
    KernelSpec(
        name="norm_heads",
        summary="each head of queries and keys / rms · weight, in place",
        axes=("T", "Hq", "Hkv", "D", "gap"),
        twin=reference.norm_heads,
        launch=norm_heads,
        outputs=("heads",),
        make_case=_case,
        small_shapes=(
            {"T": 0, "Hq": 2, "Hkv": 1, "D": 8},
            {"T": 1, "Hq": 1, "Hkv": 1, "D": 2},
            {"T": 3, "Hq": 9, "Hkv": 3, "D": 80},
            {"T": 2, "Hq": 4, "Hkv": 2, "D": 64, "gap": 3},
            {"T": 2, "Hq": 17, "Hkv": 1, "D": 16},
        ),
        device_shapes=(
            {"T": 1, "Hq": 32, "Hkv": 8, "D": 128},
            {"T": 64, "Hq": 32, "Hkv": 8, "D": 128},
            {"T": 8192, "Hq": 32, "Hkv": 8, "D": 128},
            {"T": 777, "Hq": 16, "Hkv": 8, "D": 128, "gap": 8},
        ),
        tolerance={
            torch.float32: Tolerance(4e-6, 1e-30, "a sum of up to 256 squares in another order, a root, three products"),
            torch.bfloat16: Tolerance(2.2 * 2.0**-8, 1e-30, _ROUNDINGS),
            torch.float16: Tolerance(2.2 * 2.0**-11, 2.0**-23, f"{_ROUNDINGS}; atol: numbers below 2**-14"),
        },
        bytes_moved=lambda shape, dtype: 2 * (shape["T"] * (shape["Hq"] + shape["Hkv"]) + 1) * shape["D"] * dtype.itemsize,
        flops=lambda shape, dtype: 4 * shape["T"] * (shape["Hq"] + shape["Hkv"]) * shape["D"],
        compiles=_compiles,
    ),
)
