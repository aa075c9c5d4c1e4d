"""Rotary embedding: every head of a token is turned by the angles of the token's position.

A program holds the two halves of ``HEADS`` heads of one token in registers, and the position's ``D / 2`` cosines and sines,
which all heads share::

    x [T, heads, D]     first  = x[t, h, 0 : D/2]       first · cos − second · sin
    cos, sin [P, D/2]   second = x[t, h, D/2 : D]       second · cos + first · sin

Bound by memory: each number is read and written once, and the
tables' rows come from the cache after a token's first program.
:func:`rotate` is also what :mod:`refimpl.kernels.kv_write` turns queries and keys by on their way.
Source: Su et al. 2021, "RoFormer"; the layout of halves is that of GPT-NeoX and Hugging Face.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from refimpl.kernels import cases, reference
from refimpl.kernels.launch import check_last_axis, check_same, device_of, dtypes_for, pointer, power_of_two
from refimpl.kernels.spec import Case, Compile, KernelSpec, Shape, Tolerance

HEADS = 16
"""Heads a program takes at most."""
NUM_WARPS = 4


@triton.jit
def rotate(
    x: tl.tensor, offsets: tl.tensor, inside: tl.tensor, half: tl.tensor, cos: tl.tensor, sin: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of heads, turned, in float32. ``offsets`` and ``inside`` are [HEADS, HALF], of the first half."""
    first = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)  # [HEADS, HALF]
    second = tl.load(x + offsets + half, mask=inside, other=0.0).to(tl.float32)  # [HEADS, HALF]
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@triton.jit
def load_angles(
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    table_stride: tl.tensor,
    token: tl.tensor,
    half: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Cosines and sines [HALF] of a token's position, in float32."""
    pair = tl.arange(0, HALF)
    row = tl.load(positions + token).to(tl.int64) * table_stride
    cosines = tl.load(cos + row + pair, mask=pair < half, other=0.0).to(tl.float32)
    sines = tl.load(sin + row + pair, mask=pair < half, other=0.0).to(tl.float32)
    return cosines, sines


@triton.jit
def rotary_kernel(
    x: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    turned: tl.tensor,
    x_token_stride: tl.tensor,
    x_head_stride: tl.tensor,
    table_stride: tl.tensor,
    turned_token_stride: tl.tensor,
    turned_head_stride: tl.tensor,
    num_heads: tl.tensor,
    half: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Heads ``program_id(1) · HEADS …`` of token ``program_id(0)``; ``turned`` may be ``x`` itself."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]  # [HEADS, 1]
    pair = tl.arange(0, HALF)[None, :]  # [1, HALF]
    inside = (head < num_heads) & (pair < half)
    cosines, sines = load_angles(positions, cos, sin, table_stride, token, half, HALF)
    first, second = rotate(x + token * x_token_stride, head * x_head_stride + pair, inside, half, cosines, sines)
    target = turned + token * turned_token_stride + head * turned_head_stride + pair
    tl.store(target, first.to(turned.dtype.element_ty), mask=inside)
    tl.store(target + half, second.to(turned.dtype.element_ty), mask=inside)


def rotary(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, turned: Tensor | None = None) -> Tensor:
    """:func:`reference.rotary_at` of ``x [T, heads, D]``, by tables ``cos, sin [P, D/2]``; tokens and heads may lie apart.

    The result is written to ``turned`` if it is given; that may be ``x`` itself.

    Raises:
        RefimplError: elements of a head lie apart, or sizes differ.

    """
    T, num_heads, D = x.shape
    turned = torch.empty_like(x, memory_format=torch.contiguous_format) if turned is None else turned
    check_angles(cos, sin, D)
    check_last_axis(x=x, turned=turned)
    check_same("sizes", x=x.shape, turned=turned.shape)
    if T and num_heads:
        heads = min(HEADS, power_of_two(num_heads))
        strides = (x.stride(0), x.stride(1), cos.stride(0), turned.stride(0), turned.stride(1))
        tiles = {"HEADS": heads, "HALF": power_of_two(D // 2), "num_warps": NUM_WARPS}
        with device_of(x):
            rotary_kernel[(T, triton.cdiv(num_heads, heads))](
                x, positions, cos, sin, turned, *strides, num_heads, D // 2, **tiles
            )
    return turned


def check_angles(cos: Tensor, sin: Tensor, D: int) -> None:
    """Tables must be two of a kind, with a column for each pair of a head.

    Raises:
        RefimplError: they are not.

    """
    check_last_axis(cos=cos, sin=sin)
    check_same("sizes of the tables", cos=cos.shape, sin=sin.shape)
    check_same("strides of the tables", cos=cos.stride(0), sin=sin.stride(0))
    check_same("pairs of a head", half_of_D=D / 2, columns=cos.shape[1])


# ---------------------------------------------------------------------- what is registered


def tables(positions: int, D: int, dtype: torch.dtype, device: torch.device, random: torch.Generator) -> dict[str, Tensor]:
    """Cosines and sines of random angles."""
    angles = torch.randn(positions, D // 2, generator=random) * 10
    return {"cos": angles.cos().to(dtype).to(device), "sin": angles.sin().to(dtype).to(device)}


def _case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    T, heads, D = shape["T"], shape["heads"], shape["D"]
    random = cases.generator(seed)
    x = cases.normal(T, heads, D, dtype=dtype, device=device, random=random, gap=shape.get("gap", 0))
    positions = torch.randint(0, 64, (T,), generator=random).to(device)
    inputs = {"x": x, "positions": positions} | tables(64, D, dtype, device, random)
    return Case(inputs, {"turned": cases.poisoned(T, heads, D, dtype=dtype, device=device)})


def _compiles(capability: int) -> tuple[Compile, ...]:
    strides = ("x_token_stride", "x_head_stride", "table_stride", "turned_token_stride", "turned_head_stride")
    numbers = dict.fromkeys((*strides, "num_heads", "half"), "i32")
    dtype = dtypes_for(capability)[0]
    pointers = dict.fromkeys(("x", "cos", "sin", "turned"), pointer(dtype)) | {"positions": "*i64"}
    found = []
    for D in (80, 256):
        tiles = {"HEADS": HEADS, "HALF": power_of_two(D // 2)}
        odd = frozenset({"half"} if D == 80 else ())
        label = f"D={D} {pointers['x'][1:]}"
        found.append(Compile(rotary_kernel, pointers | numbers, tiles, NUM_WARPS, unaligned=odd, label=label))
    return tuple(found)


def turning_tolerance(scale: float = 1.0) -> dict[torch.dtype, Tolerance]:
    """One rounding of a sum of two products, which may cancel: ``atol`` goes by their size, not the sum's."""
    return {
        torch.float32: Tolerance(1e-6, scale * 1e-6, "two products and a sum that may cancel"),
        torch.bfloat16: Tolerance(1.02 * 2.0**-8, scale * 1e-6, "one rounding; atol: the sum may cancel in float32"),
        torch.float16: Tolerance(1.02 * 2.0**-11, scale * 1e-6, "one rounding; atol: the sum may cancel in float32"),
    }


SPECS = (
    KernelSpec(
        name="rotary",
        summary="turn heads by their token's position",
        axes=("T", "heads", "D", "gap"),
        twin=reference.rotary_at,
        launch=rotary,
        outputs=("turned",),
        make_case=_case,
        small_shapes=(
            {"T": 0, "heads": 2, "D": 8},
            {"T": 1, "heads": 1, "D": 2},
            {"T": 3, "heads": 9, "D": 80},
            {"T": 2, "heads": 17, "D": 64, "gap": 3},
            {"T": 2, "heads": 3, "D": 256},
        ),
        device_shapes=(
            {"T": 1, "heads": 40, "D": 128},
            {"T": 64, "heads": 40, "D": 128},
            {"T": 8192, "heads": 40, "D": 128},
            {"T": 777, "heads": 12, "D": 64, "gap": 8},
            {"T": 256, "heads": 5, "D": 80},
            {"T": 256, "heads": 10, "D": 256},
        ),
        tolerance=turning_tolerance(),
        bytes_moved=lambda shape, dtype: 2 * shape["T"] * shape["heads"] * shape["D"] * dtype.itemsize,
        flops=lambda shape, dtype: 3 * shape["T"] * shape["heads"] * shape["D"],
        compiles=_compiles,
    ),
)
