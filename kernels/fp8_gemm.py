"""``y = x Wᵀ`` by FP8 weights for a few tokens: half the bytes of a decode step, and the same reading of them.

Weights have a scale for each output channel, activations one for each token (:mod:`refimpl.kernels.fp8_quantise`), so both
leave the sum and are multiplied in at its end::

    y[t, o] = scales[t] · weight_scales[o] · Σ values[t, i] · weight[o, i]          values, weight in e4m3

One token is bound by memory and by how soon it is under way: as in :mod:`refimpl.kernels.linear`, ROWS outputs a program,
each weight from memory to the register where it is used. A program asks for its first weights before it waits for the kernel
that makes its activations (programmatic dependent launch, from sm_90 on): weights are there since the model was loaded.
With ``GATED`` the rows are those of SwiGLU's two matrices (Shazeer 2020); what is written is ``silu(gate) · up``.

Several tokens go through tensor cores, the weight as the taller side, since its side of a product is 64 at least::

    weight [ROWS, COLUMNS] · (values [TOKENS, COLUMNS])ᵀ  added up over COLUMNS  ─►  [ROWS, TOKENS]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from refimpl.kernels import cases, reference
from refimpl.kernels.launch import check_last_axis, check_same, device_of, dtypes_for, overlap, pointer
from refimpl.kernels.spec import WITHOUT_FP8, Case, Compile, KernelSpec, Shape, Tolerance

MOST_TOKENS = 16
"""Beyond so many, a library's product is as fast."""
ONE_TOKEN = {False: (8, 1024, 4), True: (4, 1024, 4)}
"""(ROWS, COLUMNS, warps) for one token, by ``GATED``."""
FEW_TOKENS = (64, 256, 4)
"""(ROWS, COLUMNS, warps) for up to TOKENS tokens."""
TOKENS = 16
STAGES = 4


@triton.jit
def _weights(
    rows: tl.tensor, inside: tl.tensor, start: tl.tensor, in_features: tl.tensor, COLUMNS: tl.constexpr
) -> tl.tensor:
    """The tile that begins at column ``start`` of the rows pointed to; 0 beyond the matrix. [ROWS, COLUMNS]."""
    column = start + tl.arange(0, COLUMNS)
    there = inside[:, None] & (column < in_features)[None, :]
    return tl.load(rows[:, None] + column[None, :], mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit
def _times(
    values: tl.tensor,
    weight: tl.tensor,
    rows: tl.tensor,
    inside: tl.tensor,
    in_features: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """``values`` times the rows pointed to, of which ``weight`` is the first tile, there already. [ROWS], float32."""
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, in_features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        number = tl.load(values + column, mask=column < in_features, other=0.0)
        sums += weight.to(tl.float32) * number.to(tl.float32)[None, :]
        weight = _weights(rows, inside, start + COLUMNS, in_features, COLUMNS)
    return tl.sum(sums, axis=1)


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
    OVERLAP: tl.constexpr,
) -> None:
    """Outputs ``program_id(0) · ROWS …``; with ``GATED`` the weight has twice as many rows, gate's first."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < out_features
    rows = weight + row.to(tl.int64) * weight_stride
    first = _weights(rows, inside, 0, in_features, COLUMNS)
    scale = tl.load(weight_scales + row, mask=inside, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token_scale = tl.load(scales)
    sums = _times(values, first, rows, inside, in_features, ROWS, COLUMNS) * (scale * token_scale)
    if GATED:
        rows = weight + (out_features + row).to(tl.int64) * weight_stride
        first = _weights(rows, inside, 0, in_features, COLUMNS)
        scale = tl.load(weight_scales + out_features + row, mask=inside, other=0.0)
        up = _times(values, first, rows, inside, in_features, ROWS, COLUMNS) * (scale * token_scale)
        sums = sums / (1.0 + tl.exp(-sums)) * up
    tl.store(result + row, sums.to(result.dtype.element_ty), mask=inside)


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
    OVERLAP: tl.constexpr,
) -> None:
    """Outputs ``program_id(0) · ROWS …`` of tokens ``program_id(1) · TOKENS …``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside, there = row < out_features, token < num_tokens
    rows = weight + row.to(tl.int64) * weight_stride
    numbers = values + token.to(tl.int64) * values_stride
    scale = tl.load(weight_scales + row, mask=inside, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, in_features, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        tile = _weights(rows, inside, start, in_features, COLUMNS)
        mask = there[:, None] & (column < in_features)[None, :]
        number = tl.load(numbers[:, None] + column[None, :], mask=mask, other=0.0)  # [TOKENS, COLUMNS]
        sums = tl.dot(tile, tl.trans(number), sums)
    token_scale = tl.load(scales + token, mask=there, other=0.0)
    product = sums * scale[:, None] * token_scale[None, :]
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
    rows, columns, warps = FEW_TOKENS
    overlapping, option = overlap(values.device)
    with device_of(values):
        fp8_few_tokens_kernel[(triton.cdiv(out_features, rows), triton.cdiv(T, TOKENS))](
            *(values, scales, weight, weight_scales, result),
            *(values.stride(0), weight.stride(0), result.stride(0), T, out_features, in_features),
            TOKENS=TOKENS,
            ROWS=rows,
            COLUMNS=columns,
            OVERLAP=overlapping,
            num_warps=warps,
            num_stages=STAGES,
            **option,
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
    if out_features:
        rows, columns, warps = ONE_TOKEN[gated]
        overlapping, option = overlap(values.device)
        with device_of(values):
            fp8_one_token_kernel[(triton.cdiv(out_features, rows),)](
                *(values, scales, weight, weight_scales, result, weight.stride(0), out_features, weight.shape[1]),
                GATED=gated,
                ROWS=rows,
                COLUMNS=columns,
                OVERLAP=overlapping,
                num_warps=warps,
                **option,
            )
    return result


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
        rows, columns, warps = ONE_TOKEN[gated]
        ahead = {"OVERLAP": capability >= 90}
        compiled = {"GATED": gated, "ROWS": rows, "COLUMNS": columns} | ahead
        one = Compile(fp8_one_token_kernel, tensors | numbers, compiled, warps, label="one token")
        if gated:
            return (one,)
        more = dict.fromkeys(("values_stride", "result_stride", "num_tokens"), "i32")
        rows, columns, warps = FEW_TOKENS
        compiled = {"TOKENS": TOKENS, "ROWS": rows, "COLUMNS": columns} | ahead
        few = Compile(
            *(fp8_few_tokens_kernel, tensors | numbers | more, compiled, warps, STAGES),
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
            for T in ((1,) if gated else (1, 4, 16))
            for out_features, in_features in served
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
