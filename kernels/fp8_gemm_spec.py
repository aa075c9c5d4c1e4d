"""What is registered of :mod:`refimpl.kernels.fp8_gemm`: shapes, the error that is allowed, and what is compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from refimpl.kernels import cases, reference
from refimpl.kernels.fp8_gemm import compiled_in, cut, fp8_gated_linear, fp8_linear, fp8_linear_kernel
from refimpl.kernels.launch import dtypes_for, pointer
from refimpl.kernels.overlap import OVERLAPS_FROM
from refimpl.kernels.spec import WITHOUT_FP8, Case, Compile, KernelSpec, Shape, Tolerance

LARGEST_ERROR = 1e-2
"""Of all outputs together, relative, in the L2 norm. What is measured is 0.002 to 0.005: tensor cores of sm_90 add products
of FP8 numbers up with few digits."""


def complain(case: Case, got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """What is wrong with a product: its error as a whole, or an output that is far off for its size and a usual one's."""
    off, size = got["result"].double() - expected["result"], expected["result"].norm()
    if not off.numel():
        return []
    usual = size / off.numel() ** 0.5  # a gated output can be twenty times as large
    error, far = float(off.norm() / size), float((off.abs() / (usual + expected["result"].abs())).max())
    found = [] if error <= LARGEST_ERROR else [f"result is off by {error:.2g} in the L2 norm"]
    return found if far <= 10 * LARGEST_ERROR else [*found, f"an output is off by {far:.2g} of its size and a usual one's"]


def _make(gated: bool) -> Callable[[Shape, torch.dtype, torch.device, int], Case]:
    def case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
        T, out_features, in_features = shape["T"], shape["out_features"], shape["in_features"]
        random, rows = cases.generator(seed), out_features * (2 if gated else 1)
        x = cases.normal(T, in_features, dtype=torch.float32, device=device, random=random)
        scale = in_features**-0.5
        matrix = cases.normal(rows, in_features, dtype=torch.float32, device=device, random=random, scale=scale)
        gap = shape.get("gap", 0)
        (values, scales), (weight, weight_scales) = reference.quantise(x), reference.quantise(matrix)
        inputs = {"values": values, "scales": scales, "weight": weight, "weight_scales": weight_scales}
        inputs |= {name: cases.spaced(inputs[name], gap) for name in ("values", "weight")}
        return Case(inputs, {"result": cases.poisoned(T, out_features, dtype=dtype, device=device)})

    return case


def _compiles(gated: bool) -> Callable[[int], tuple[Compile, ...]]:
    fp8, wide = pointer(torch.float8_e4m3fn), pointer(torch.float32)

    def compiles(capability: int) -> tuple[Compile, ...]:
        signature = {"values": fp8, "scales": wide, "weight": fp8, "weight_scales": wide, "parts": wide}
        signature |= {"result": pointer(dtypes_for(capability)[0]), "arrivals": pointer(torch.int32)}
        numbers = ("values_stride", "weight_stride", "result_stride", "num_tokens", "out_features", "in_features")
        signature |= dict.fromkeys(numbers, "i32")
        overlap = capability >= OVERLAPS_FROM
        found = []
        served = ((1, 57344), (64, 57344)) if gated else ((1, 4096), (64, 4096), (1, 10240), (128, 8192))
        for tokens, outputs in served:
            one = cut(tokens, outputs, 14336)
            compiled = {"GATED": gated, "OVERLAP": overlap} | compiled_in(one)
            label = f"{tokens} tokens, {outputs} outputs"
            odd = frozenset({"num_tokens"})
            found.append(Compile(fp8_linear_kernel, signature, compiled, one.num_warps, one.num_stages, odd, label))
        return tuple(found)

    return compiles


def _bytes(matrices: int) -> Callable[[Shape, torch.dtype], int]:
    def moved(shape: Shape, dtype: torch.dtype) -> int:
        T, out_features = shape["T"], shape["out_features"]
        weights = matrices * out_features * (shape["in_features"] + 4)
        return weights + T * (shape["in_features"] + 4) + T * out_features * dtype.itemsize

    return moved


SMALL: tuple[Shape, ...] = (
    {"T": 0, "out_features": 8, "in_features": 16},
    {"T": 1, "out_features": 1, "in_features": 1},
    {"T": 1, "out_features": 9, "in_features": 80, "gap": 3},
    {"T": 5, "out_features": 70, "in_features": 300},
    {"T": 3, "out_features": 70, "in_features": 8200},
    {"T": 130, "out_features": 33, "in_features": 64, "gap": 1},
)
SERVED = ((6144, 4096), (4096, 4096), (4096, 14336), (10240, 8192), (8192, 8192), (8192, 28672))
"""Those of Llama-3-8B and -70B that are not gate's and up's."""


def _spec(name: str, summary: str, gated: bool) -> KernelSpec:
    matrices, why = 2 if gated else 1, "tensor cores add up with fewer digits; held as a whole, in the L2 norm"
    served = ((14336, 4096), (28672, 8192)) if gated else SERVED
    return KernelSpec(
        name=name,
        summary=summary,
        axes=("T", "out_features", "in_features", "gap"),
        twin=reference.fp8_gated_linear if gated else reference.fp8_linear,
        launch=fp8_gated_linear if gated else fp8_linear,
        outputs=("result",),
        make_case=_make(gated),
        small_shapes=SMALL,
        device_shapes=tuple(
            {"T": T, "out_features": out_features, "in_features": in_features}
            for T, listed in ((1, served), (16, served[:1]), (64, served[:3]))
            for out_features, in_features in listed
        ),
        tolerance=dict.fromkeys((torch.bfloat16, torch.float16, torch.float32), Tolerance(LARGEST_ERROR, 0.0, why)),
        bytes_moved=_bytes(matrices),
        flops=lambda shape, dtype: 2 * matrices * shape["T"] * shape["out_features"] * shape["in_features"],
        compiles=_compiles(gated),
        complain=complain,
        not_on=WITHOUT_FP8,
    )


SPECS = (
    _spec("fp8_linear", "a few tokens through a matrix of FP8 weights", gated=False),
    _spec("fp8_gated_linear", "a few tokens through SwiGLU's two matrices of FP8 weights", gated=True),
)
