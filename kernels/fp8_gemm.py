"""``y = x Wᵀ`` by FP8 weights for a few tokens: half the bytes of a decode step in 16 bits, read as it reads them.

Weights have a scale for each output channel, activations one for each token (:mod:`refimpl.kernels.fp8_quantise`), so both
leave the sum and are multiplied in at its end::

    y[t, o] = scales[t] · weight_scales[o] · Σ values[t, i] · weight[o, i]          values, weight in e4m3

One token is bound by memory and by how soon it is under way: as in :mod:`refimpl.kernels.linear`, a few rows of weights a
program, each weight from memory to the register where it is used. A program asks for its first weights before it waits for
the kernel that makes its activations (:mod:`refimpl.kernels.overlap`). With ``GATED`` the rows are pairs of SwiGLU's two
matrices (Shazeer 2020), and what is written is ``silu(gate) · up``.

Several tokens go through tensor cores, the weight as the taller side::

    weight [ROWS, COLUMNS] · (values [TOKENS, COLUMNS])ᵀ  added up over COLUMNS  ─►  [ROWS, TOKENS]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels import cases, reference
from refimpl.kernels.launch import check_last_axis, check_same, device_of, dtypes_for, pointer
from refimpl.kernels.overlap import OVERLAPS_FROM, after_previous, overlapping, prefetch
from refimpl.kernels.spec import WITHOUT_FP8, Case, Compile, KernelSpec, Shape, Tolerance

MOST_TOKENS = 16
"""Beyond so many, a library's product is as fast."""


class Tiles(NamedTuple):
    """How a product is cut."""

    rows: int
    """Of weights a program; with ``GATED`` they are pairs, of gate and of up."""
    columns: int
    num_warps: int
    num_stages: int
    ahead: int
    """Weights of each row that are asked for while the kernel before still runs."""


ONE_TOKEN = Tiles(4, 2048, 4, 2, 2048)
FEW_TOKENS = Tiles(64, 256, 4, 4, 1024)
TOKENS = 16
"""That a tile of several has room for."""


@triton.jit
def _rows_of(out_features: tl.tensor, GATED: tl.constexpr, ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Which rows of the weight are this program's, and which of them exist. [ROWS] each.

    With ``GATED`` the matrix has twice ``out_features`` rows, gate's first; a program takes pairs, side by side.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if GATED:
        inside = row // 2 < out_features
        row = row // 2 + row % 2 * out_features
    else:
        inside = row < out_features
    return tl.where(inside, row, 0), inside


@triton.jit
def _ask_for(rows: tl.tensor, in_features: tl.tensor, AHEAD: tl.constexpr) -> None:
    """Have the first ``AHEAD`` bytes of each row brought to the second-level cache, by lines of 128."""
    column = tl.minimum(tl.arange(0, AHEAD // 128) * 128, in_features - 1)
    prefetch(rows.to(tl.int64)[:, None] + column[None, :])


@triton.jit
def _weights(
    rows: tl.tensor, inside: tl.tensor, start: tl.tensor, in_features: tl.tensor, COLUMNS: tl.constexpr
) -> tl.tensor:
    """The tile that begins at column ``start`` of the rows pointed to; 0 beyond the matrix. [ROWS, COLUMNS]."""
    column = start + tl.arange(0, COLUMNS)
    there = inside[:, None] & (column < in_features)[None, :]
    return tl.load(rows[:, None] + column[None, :], mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit
def fp8_one_token_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    result: tl.tensor,
    weight_stride: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """``ROWS`` rows of weights times one token; the next tile is on its way while one is multiplied."""
    row, inside = _rows_of(out_features, GATED, ROWS)
    rows = weight + row.to(tl.int64) * weight_stride
    if AHEAD:
        _ask_for(rows, in_features, AHEAD)
    tile = _weights(rows, inside, 0, in_features, COLUMNS)
    scale = tl.load(weight_scales + row)
    after_previous(OVERLAP)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, in_features, COLUMNS):
        following = _weights(rows, inside, start + COLUMNS, in_features, COLUMNS)
        column = start + tl.arange(0, COLUMNS)
        number = tl.load(values + column, mask=column < in_features, other=0.0)
        sums += tile.to(tl.float32) * number.to(tl.float32)[None, :]
        tile = following
    outputs = tl.sum(sums, axis=1) * scale * tl.load(scales)  # [ROWS]
    if GATED:
        gate, up = tl.split(tl.reshape(outputs, (ROWS // 2, 2)))  # [ROWS / 2] each
        outputs = gate / (1.0 + tl.exp(-gate)) * up
    output = tl.program_id(0) * outputs.shape[0] + tl.arange(0, outputs.shape[0])
    tl.store(result + output, outputs.to(result.dtype.element_ty), mask=output < out_features)


@triton.jit
def fp8_few_tokens_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    result: tl.tensor,
    values_stride: tl.tensor,
    weight_stride: tl.tensor,
    result_stride: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """``ROWS`` rows of weights times tokens ``program_id(1) · TOKENS …``."""
    row, inside = _rows_of(out_features, False, ROWS)
    rows = weight + row.to(tl.int64) * weight_stride
    if AHEAD:
        _ask_for(rows, in_features, AHEAD)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    there = token < num_tokens
    numbers = values + token.to(tl.int64) * values_stride
    scale = tl.load(weight_scales + row)
    after_previous(OVERLAP)
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, in_features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        tile = _weights(rows, inside, start, in_features, COLUMNS)
        mask = there[:, None] & (column < in_features)[None, :]
        number = tl.load(numbers[:, None] + column[None, :], mask=mask, other=0.0)  # [TOKENS, COLUMNS]
        sums = tl.dot(tile, tl.trans(number), sums)
    product = sums * scale[:, None] * tl.load(scales + token, mask=there, other=0.0)[None, :]
    place = result + token.to(tl.int64)[None, :] * result_stride + row[:, None]
    tl.store(place, product.to(result.dtype.element_ty), mask=inside[:, None] & there[None, :])


def fp8_linear(values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, result: Tensor) -> Tensor:
    """:func:`reference.fp8_linear` of ``values [T, in_features]``, written to ``result [T, out_features]``.

    It takes any number of tokens, but reads the weights once for every ``TOKENS`` of them.

    Raises:
        RefimplError: elements of a row lie apart, or sizes differ.

    """
    (T, in_features), out_features = values.shape, weight.shape[0]
    _check(values, scales, weight, weight_scales, result)
    check_same("sizes", result=tuple(result.shape), product=(T, out_features))
    if T == 1:
        return _one_token(values, scales, weight, weight_scales, result, gated=False)
    if not T or not out_features:
        return result
    cut, options = FEW_TOKENS, overlapping(values)
    with device_of(values):
        fp8_few_tokens_kernel[(triton.cdiv(out_features, cut.rows), triton.cdiv(T, TOKENS))](
            *(values, scales, weight, weight_scales, result),
            *(values.stride(0), weight.stride(0), result.stride(0), T, out_features, in_features),
            TOKENS=TOKENS,
            **_compiled(cut, options["OVERLAP"]),
            num_warps=cut.num_warps,
            num_stages=cut.num_stages,
            **options,
        )
    return result


def fp8_gated_linear(values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, result: Tensor) -> Tensor:
    """:func:`reference.fp8_gated_linear` of one token, by gate's and up's weights ``[2·I, in_features]``: ``[1, I]``.

    Raises:
        RefimplError: there are several tokens, elements of a row lie apart, or sizes differ.

    """
    _check(values, scales, weight, weight_scales, result)
    check_same("sizes", twice_result=(1, 2 * result.shape[1]), product=(len(values), weight.shape[0]))
    return _one_token(values, scales, weight, weight_scales, result, gated=True)


def _check(values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, result: Tensor) -> None:
    tensors = {"scales": scales, "weight_scales": weight_scales, "result": result}
    check_last_axis(values=values, weight=weight, **tensors)
    check_same("row lengths", values=values.shape[1], weight=weight.shape[1])
    check_same("sizes", scales=tuple(scales.shape), tokens=(len(values),))
    check_same("sizes", weight_scales=tuple(weight_scales.shape), weight=(len(weight),))


def _one_token(values: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, result: Tensor, gated: bool) -> Tensor:
    out_features = result.shape[1]
    cut, options = ONE_TOKEN, overlapping(values)
    if out_features:
        with device_of(values):
            fp8_one_token_kernel[(triton.cdiv(len(weight), cut.rows),)](
                *(values, scales, weight, weight_scales, result, weight.stride(0), out_features, weight.shape[1]),
                GATED=gated,
                **_compiled(cut, options["OVERLAP"]),
                num_warps=cut.num_warps,
                **options,
            )
    return result


def _compiled(cut: Tiles, overlap: bool) -> dict[str, int]:
    return {"ROWS": cut.rows, "COLUMNS": cut.columns, "AHEAD": cut.ahead if overlap else 0}


# ---------------------------------------------------------------------- what is registered


def _make(gated: bool) -> Callable[[Shape, torch.dtype, torch.device, int], Case]:
    def case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
        T, out_features, in_features = shape.get("T", 1), shape["out_features"], shape["in_features"]
        random, rows = cases.generator(seed), out_features * (2 if gated else 1)
        x = cases.normal(T, in_features, dtype=torch.float32, device=device, random=random)
        matrix = cases.normal(rows, in_features, dtype=torch.float32, device=device, random=random, scale=in_features**-0.5)
        gap = shape.get("gap", 0)
        (values, scales), (weight, weight_scales) = reference.quantise(x), reference.quantise(matrix)
        inputs = {"values": values, "scales": scales, "weight": weight, "weight_scales": weight_scales}
        inputs |= {name: cases.spaced(inputs[name], gap) for name in ("values", "weight")}
        return Case(inputs, {"result": cases.poisoned(T, out_features, dtype=dtype, device=device)})

    return case


def _compiles(gated: bool) -> Callable[[int], tuple[Compile, ...]]:
    fp8, scale = pointer(torch.float8_e4m3fn), pointer(torch.float32)

    def compiles(capability: int) -> tuple[Compile, ...]:
        tensors = {"values": fp8, "scales": scale, "weight": fp8, "weight_scales": scale}
        tensors["result"] = pointer(dtypes_for(capability)[0])
        numbers = dict.fromkeys(("weight_stride", "out_features", "in_features"), "i32")
        ahead = {"OVERLAP": capability >= OVERLAPS_FROM}
        compiled = {"GATED": gated} | _compiled(ONE_TOKEN, capability >= OVERLAPS_FROM) | ahead
        one = Compile(fp8_one_token_kernel, tensors | numbers, compiled, ONE_TOKEN.num_warps, label="one token")
        if gated:
            return (one,)
        more = dict.fromkeys(("values_stride", "result_stride", "num_tokens"), "i32")
        few = Compile(
            *(fp8_few_tokens_kernel, tensors | numbers | more),
            {"TOKENS": TOKENS} | _compiled(FEW_TOKENS, capability >= OVERLAPS_FROM) | ahead,
            *(FEW_TOKENS.num_warps, FEW_TOKENS.num_stages),
            unaligned=frozenset({"num_tokens"}),
            label=f"{TOKENS} tokens",
        )
        return (one, few)

    return compiles


def _bytes(matrices: int) -> Callable[[Shape, torch.dtype], int]:
    def moved(shape: Shape, dtype: torch.dtype) -> int:
        T, out_features = shape.get("T", 1), shape["out_features"]
        weights = matrices * out_features * (shape["in_features"] + 4)
        return weights + T * (shape["in_features"] + 4) + T * out_features * dtype.itemsize

    return moved


WHY = "{} rounding, of a sum of up to 28,672 products of about 1 in another order, in tensor cores with fewer digits"
SERVED = ((6144, 4096), (4096, 4096), (4096, 14336), (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))
"""Those of Llama-3-8B and -70B that no gate goes through."""


def _spec(name: str, summary: str, gated: bool) -> KernelSpec:
    matrices = 2 if gated else 1
    small = ({"out_features": 0, "in_features": 16}, {"out_features": 1, "in_features": 1}, *_SMALL)
    tokens = (1,) if gated else (1, 5)
    served = ((14336, 4096), (28672, 8192), (1536, 576)) if gated else SERVED
    return KernelSpec(
        name=name,
        summary=summary,
        axes=("T", "out_features", "in_features", "gap"),
        twin=reference.fp8_gated_linear if gated else reference.fp8_linear,
        launch=fp8_gated_linear if gated else fp8_linear,
        outputs=("result",),
        make_case=_make(gated),
        small_shapes=tuple({"T": T} | dict(shape) for T in tokens for shape in small),
        device_shapes=tuple(
            {"T": T, "out_features": out_features, "in_features": in_features}
            for T, listed in ((1, served), (4, () if gated else served[:3]), (16, () if gated else served[:3]))
            for out_features, in_features in listed
        ),
        tolerance={
            torch.bfloat16: Tolerance(1.02 * 2.0**-8, 2e-3, WHY.format("one")),
            torch.float16: Tolerance(1.02 * 2.0**-11, 2e-3, WHY.format("one")),
            torch.float32: Tolerance(1e-6, 2e-3, WHY.format("no")),
        },
        bytes_moved=_bytes(matrices),
        flops=lambda shape, dtype: 2 * matrices * shape.get("T", 1) * shape["out_features"] * shape["in_features"],
        compiles=_compiles(gated),
        not_on=WITHOUT_FP8,
    )


_SMALL: tuple[Shape, ...] = (
    {"out_features": 9, "in_features": 80, "gap": 3},
    {"out_features": 17, "in_features": 1040},
    {"out_features": 70, "in_features": 300},
)

SPECS = (
    _spec("fp8_linear", "a few tokens through a matrix of FP8 weights", gated=False),
    _spec("fp8_gated_linear", "one token through SwiGLU's two matrices of FP8 weights", gated=True),
)
