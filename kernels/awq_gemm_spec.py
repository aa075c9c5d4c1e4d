"""What is registered of :mod:`refimpl.kernels.awq_gemm` and :mod:`refimpl.kernels.awq_dequantise`."""

from __future__ import annotations

import torch
from torch import Tensor

from refimpl.kernels import awq_dequantise as dequantising
from refimpl.kernels import awq_reference, cases
from refimpl.kernels.attention_tiles import operand
from refimpl.kernels.awq_dequantise import awq_dequantise, awq_dequantise_kernel
from refimpl.kernels.awq_gemm import NUM_WARPS, awq_linear, awq_linear_kernel, compiled_in, cut
from refimpl.kernels.launch import dtypes_for, pointer
from refimpl.kernels.overlap import OVERLAPS_FROM
from refimpl.kernels.spec import Case, Compile, KernelSpec, Shape, Tolerance


def _weight(shape: Shape, rows: int, device: torch.device, random: torch.Generator) -> dict[str, Tensor | int]:
    """Random words, scales and zero points of every size; what fills a row up has scales of 0."""
    in_features, group_size = shape["in_features"], shape["group"]
    values = torch.randint(0, 16, (rows, in_features), generator=random, dtype=torch.uint8)
    groups, padded = in_features // group_size, awq_reference.padded_groups(in_features, group_size)
    scales, zeros = torch.zeros(padded, rows, dtype=torch.float16), torch.zeros(padded, rows, dtype=torch.uint8)
    scales[:groups] = (torch.rand(groups, rows, generator=random) + 0.5) * in_features**-0.5 / 6
    zeros[:groups] = torch.randint(0, 16, (groups, rows), generator=random, dtype=torch.uint8)
    return {
        "words": awq_reference.pack_words(values.to(device), group_size),
        "scales": awq_reference.pack_scales(scales.to(device)),
        "zeros": awq_reference.pack_zeros(zeros.to(device)),
        "group_size": group_size,
    }


def _make(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    T, out_features, in_features = shape["T"], shape["out_features"], shape["in_features"]
    random = cases.generator(seed)
    x = cases.normal(T, in_features, dtype=dtype, device=device, random=random, gap=shape.get("gap", 0))
    weight = _weight(shape, out_features, device, random)
    return Case({"x": x} | weight, {"result": cases.poisoned(T, out_features, dtype=dtype, device=device)})


def _make_dequantised(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    out_features, in_features = shape["out_features"], shape["in_features"]
    inputs = _weight(shape, out_features, device, cases.generator(seed)) | {"in_features": in_features}
    return Case(inputs, {"result": cases.poisoned(out_features, in_features, dtype=dtype, device=device)})


def _signature(capability: int) -> dict[str, str]:
    tensors = {"words": torch.int16, "scales": torch.int64, "zeros": torch.int16}
    signature = {name: pointer(dtype) for name, dtype in tensors.items()} | {"result": pointer(dtypes_for(capability)[0])}
    return signature | dict.fromkeys(("result_stride", "in_features"), "i32")


def _compiles(capability: int) -> tuple[Compile, ...]:
    dtype = dtypes_for(capability)[0]
    signature = _signature(capability) | {"x": pointer(dtype), "parts": pointer(torch.float32)}
    signature |= {"arrivals": pointer(torch.int32), "x_stride": "i32", "num_tokens": "i32", "num_rows": "i32"}
    found = []
    served = ((1, 8192, 28672), (1, 57344, 8192), (16, 8192, 8192), (32, 57344, 8192))
    for tokens, outputs, inputs in served if capability >= 80 else served[:1]:
        one = cut(tokens, outputs, inputs, 128, capability)
        compiled = {"OPERAND": operand(dtype), "OVERLAP": capability >= OVERLAPS_FROM}
        found.append(
            Compile(
                awq_linear_kernel,
                signature,
                compiled | compiled_in(one, inputs, 128),
                NUM_WARPS,
                one.num_stages,
                frozenset({"num_tokens"}),
                f"{tokens} tokens, {outputs} outputs",
                may_spill=one.registers == 128,  # by Triton 3.6 up to 8 bytes, outside of the loop
                max_registers=one.registers,
            )
        )
    return tuple(found)


def _compiles_dequantised(capability: int) -> tuple[Compile, ...]:
    compiled = {"ROWS": dequantising.ROWS, "GROUP": 128, "OVERLAP": capability >= OVERLAPS_FROM}
    signature = _signature(capability) | {"out_features": "i32"}
    return (Compile(awq_dequantise_kernel, signature, compiled, dequantising.NUM_WARPS),)


def _weight_bytes(shape: Shape, rows: int) -> int:
    return awq_reference.weight_bytes(rows, shape["in_features"], shape["group"])


def _bytes(shape: Shape, dtype: torch.dtype) -> int:
    out_features = shape["out_features"]
    return _weight_bytes(shape, out_features) + shape["T"] * (shape["in_features"] + out_features) * dtype.itemsize


SMALL: tuple[Shape, ...] = (
    {"T": 0, "out_features": 8, "in_features": 128, "group": 128},
    {"T": 1, "out_features": 3, "in_features": 32, "group": 32},
    {"T": 1, "out_features": 9, "in_features": 640, "group": 128, "gap": 16},
    {"T": 5, "out_features": 130, "in_features": 320, "group": 64},
    {"T": 12, "out_features": 70, "in_features": 576, "group": 64},
    {"T": 70, "out_features": 20, "in_features": 96, "group": 32, "gap": 8},
)
SMALL_WEIGHTS: tuple[Shape, ...] = (
    {"out_features": 0, "in_features": 128, "group": 128},
    {"out_features": 3, "in_features": 32, "group": 32},
    {"out_features": 17, "in_features": 640, "group": 128},
    {"out_features": 33, "in_features": 320, "group": 64},
)
SERVED = ((8192, 28672), (57344, 8192), (10240, 8192), (8192, 8192), (6144, 4096), (4096, 4096), (4096, 14336))
"""Those of Llama-3-70B and -8B."""
WHY = "sums of up to 28,672 products in float32, and one rounding"
TOLERANCE = {
    torch.bfloat16: Tolerance(1.02 * 2.0**-8, 1e-4, WHY),
    torch.float16: Tolerance(1.02 * 2.0**-11, 1e-4, WHY),
}
ROUNDED = {
    torch.float32: Tolerance(1e-7, 0.0, "one product of numbers that float32 holds"),
    torch.bfloat16: Tolerance(1.01 * 2.0**-8, 0.0, "one rounding"),
    torch.float16: Tolerance(1.01 * 2.0**-11, 2.0**-25, "one rounding"),
}


SPECS = (
    KernelSpec(
        name="awq_linear",
        summary="a few tokens through a matrix of 4-bit weights",
        axes=("T", "out_features", "in_features", "group", "gap"),
        twin=awq_reference.awq_linear,
        launch=awq_linear,
        outputs=("result",),
        make_case=_make,
        small_shapes=SMALL,
        device_shapes=tuple(
            {"T": T, "out_features": out_features, "in_features": in_features, "group": 128}
            for T, listed in ((1, SERVED), (16, SERVED[:2]), (64, SERVED[:2]))
            for out_features, in_features in listed
        ),
        tolerance=TOLERANCE,
        bytes_moved=_bytes,
        flops=lambda shape, dtype: 2 * shape["T"] * shape["out_features"] * shape["in_features"],
        compiles=_compiles,
    ),
    KernelSpec(
        name="awq_dequantise",
        summary="4-bit weights written out in 16",
        axes=("out_features", "in_features", "group", "gap"),
        twin=awq_reference.dequantise,
        launch=awq_dequantise,
        outputs=("result",),
        make_case=_make_dequantised,
        small_shapes=SMALL_WEIGHTS,
        device_shapes=({"out_features": 28672, "in_features": 8192, "group": 128},),
        tolerance=ROUNDED,
        bytes_moved=lambda shape, dtype: (
            _weight_bytes(shape, shape["out_features"]) + shape["out_features"] * shape["in_features"] * dtype.itemsize
        ),
        flops=lambda shape, dtype: 2 * shape["out_features"] * shape["in_features"],
        compiles=_compiles_dequantised,
    ),
)
