"""What is registered of :mod:`refimpl.kernels.fp8_quantise`: shapes, bounds, and what is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from refimpl.kernels import cases, fp8_quantise, reference
from refimpl.kernels.launch import dtypes_for, pointer, power_of_two
from refimpl.kernels.overlap import OVERLAPS_FROM
from refimpl.kernels.rms_norm import EPS, tile
from refimpl.kernels.spec import WITHOUT_FP8, Case, Compile, KernelSpec, Shape, Tolerance

HALF_STEP = 2.0**-4
"""Of e4m3, relative: 3 bits of mantissa."""
LEAST_STEP = 2.0**-9
"""Of e4m3, absolute: between the numbers next to 0."""


def complain(
    case: Case, got: dict[str, Tensor], expected: dict[str, Tensor], exact: Callable[..., Any], roundings: int
) -> list[str]:
    """What is wrong with quantised rows: each number is the nearest in e4m3, up to what was rounded on the way.

    Where a quotient lies half-way between two numbers either is right, so values are held against the unrounded row, which
    ``exact`` gives for the case's inputs in float64.
    """
    wide = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in case.inputs.items()
    }
    row, scales = exact(**wide), got["scales"].double().unsqueeze(-1)
    dtype = next(value.dtype for value in case.inputs.values() if isinstance(value, Tensor))
    # The interpreter cuts float32 off to bfloat16 where a GPU rounds, which is up to twice as far.
    unit = (torch.finfo(dtype).eps / 2) * (2 if dtype == torch.bfloat16 and not row.is_cuda else 1)
    rounding = 1.1 * roundings * unit if dtype != torch.float32 else 4e-6
    furthest = (HALF_STEP * 1.001 + rounding) * row.abs() + scales * LEAST_STEP * 0.501
    off = (got["values"].double() * scales - row).abs()
    found = [f"values{place} are {off[tuple(place)]:g} off" for place in (~(off <= furthest)).nonzero()[:8].tolist()]
    near = torch.isclose(got["scales"].double(), expected["scales"], rtol=rounding + 1e-6, atol=0)
    found += [f"scales{place} are wrong" for place in (~near).nonzero()[:8].tolist()]
    if "new_residual" in got:
        new, sums = got["new_residual"].double(), expected["new_residual"]
        near = torch.isclose(new, sums, rtol=rounding, atol=1e-30)
        found += [f"new_residual{place} is wrong" for place in (~near).nonzero()[:8].tolist()]
    return found


def _outputs(T: int, size: int, device: torch.device) -> dict[str, Tensor]:
    return {
        "values": cases.poisoned(T, size, dtype=torch.float8_e4m3fn, device=device),
        "scales": cases.poisoned(T, dtype=torch.float32, device=device),
    }


def _rows_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    T, size = shape["T"], shape["C"]
    random, gap = cases.generator(seed), shape.get("gap", 0)
    x = torch.randn(T, size, generator=random) * 3.0
    x[1:2] = 0  # a row of zeros, where there are two
    return Case({"x": cases.spaced(x.to(dtype).to(device), gap)}, _outputs(T, size, device))


def _norm_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, add: bool) -> Case:
    T, H, gap = shape["T"], shape["H"], shape.get("gap", 0)
    random = cases.generator(seed)
    inputs = {
        name: cases.normal(T, H, dtype=dtype, device=device, random=random, scale=3.0, gap=gap)
        for name in (("x", "residual") if add else ("x",))
    }
    weight = cases.normal(H, dtype=dtype, device=device, random=random)
    out = _outputs(T, H, device)
    if add:
        out["new_residual"] = cases.poisoned(T, H, dtype=dtype, device=device)
    return Case(inputs | {"weight": weight, "eps": EPS}, out)


def _silu_case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    T, size = shape["T"], shape["I"]
    random, gap = cases.generator(seed), shape.get("gap", 0)
    gate_up = cases.normal(T, 2 * size, dtype=dtype, device=device, random=random, scale=4.0, gap=gap)
    return Case({"gate_up": gate_up}, _outputs(T, size, device))


def _signature(capability: int, inputs: tuple[str, ...], numbers: tuple[str, ...]) -> dict[str, str]:
    tensors = dict.fromkeys(inputs, pointer(dtypes_for(capability)[0]))
    tensors |= {"values": pointer(torch.float8_e4m3fn), "scales": pointer(torch.float32)}
    return tensors | dict.fromkeys(numbers, "i32")


def _rows_compiles(capability: int) -> tuple[Compile, ...]:
    block = power_of_two(28672)
    signature = _signature(capability, ("x",), ("x_stride", "values_stride", "size"))
    compiled = {"BLOCK": block, "OVERLAP": capability >= OVERLAPS_FROM}
    return (Compile(fp8_quantise.quantise_kernel, signature, compiled, fp8_quantise.warps_for(block), label="28672"),)


def _norm_compiles(capability: int, add: bool) -> tuple[Compile, ...]:
    tensors = ("x", "residual", "weight", "new_residual")
    strides = ("x_stride", "residual_stride", "values_stride", "new_residual_stride", "H")
    block, warps = tile(8192)
    signature = _signature(capability, tensors, strides) | {"eps": "fp32"}
    compiled = {"ADD": add, "BLOCK_H": block, "OVERLAP": capability >= OVERLAPS_FROM}
    return (Compile(fp8_quantise.rms_norm_quantise_kernel, signature, compiled, warps, label="H=8192"),)


def _silu_compiles(capability: int) -> tuple[Compile, ...]:
    signature = _signature(capability, ("gate_up",), ("gate_up_stride", "values_stride", "size"))

    def one(size: int) -> Compile:
        block, whole, warps = fp8_quantise.silu_tile(size)
        compiled = {"WHOLE": whole, "BLOCK": block, "OVERLAP": capability >= OVERLAPS_FROM}
        return Compile(fp8_quantise.silu_mul_quantise_kernel, signature, compiled, warps, label=f"I={size}")

    return one(14336), one(28672), one(53248)


def _spec(
    name: str,
    summary: str,
    axis: str,
    exact: Callable[..., Any],
    make_case: Callable[[Shape, torch.dtype, torch.device, int], Case],
    compiles: Callable[[int], tuple[Compile, ...]],
    roundings: int = 0,
    inputs: int = 1,
    outputs: tuple[str, ...] = ("values", "scales"),
) -> KernelSpec:
    """``inputs`` and ``outputs`` say how many rows of the model's dtype are read and written, beside the values."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    wide = 14336 if axis == "I" else 4096
    rows = inputs + len(outputs) - 2
    why = f"half a step of e4m3, and {roundings} roundings to the dtype before it"
    return KernelSpec(
        name=name,
        summary=summary,
        axes=("T", axis, "gap"),
        twin=getattr(reference, name),
        launch=getattr(fp8_quantise, name),
        outputs=outputs,
        make_case=make_case,
        small_shapes=tuple(
            {"T": T, axis: size, "gap": gap} for T, size, gap in ((0, 8, 0), (1, 1, 0), (3, 80, 1), (2, 576, 3))
        ),
        device_shapes=tuple({"T": T, axis: size} for T, size in ((1, wide), (64, 2 * wide), (256, wide), (4096, wide))),
        tolerance=dict.fromkeys(dtypes, Tolerance(HALF_STEP, 0.0, why)),
        bytes_moved=lambda shape, dtype: shape["T"] * (shape[axis] * (rows * dtype.itemsize + 1) + 4),
        flops=lambda shape, dtype: (4 + 4 * roundings) * shape["T"] * shape[axis],
        compiles=compiles,
        complain=partial(complain, exact=exact, roundings=roundings),
        not_on=WITHOUT_FP8,
    )


def _same(x: Tensor) -> Tensor:
    return x


def _added(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return reference.add_rms_norm(x, residual, weight, eps)[0]


SPECS = (
    _spec("quantise", "rows to e4m3 and a scale", "C", _same, _rows_case, _rows_compiles),
    _spec(
        *("rms_norm_quantise", "x / rms(x) · weight, to e4m3", "H", reference.rms_norm),
        *(partial(_norm_case, add=False), partial(_norm_compiles, add=False), 2),
    ),
    _spec(
        *("add_rms_norm_quantise", "x + residual, and its norm to e4m3", "H", _added),
        *(partial(_norm_case, add=True), partial(_norm_compiles, add=True), 3, 2),
        outputs=("values", "scales", "new_residual"),
    ),
    _spec(
        *("silu_mul_quantise", "silu(gate) · up, to e4m3", "I", reference.silu_mul, _silu_case, _silu_compiles, 1, 2),
    ),
)
