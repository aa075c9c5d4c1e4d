"""KernelSpec: all that tests, benchmarks and notebooks must know of a kernel, said once.

A kernel's file ends with ``SPECS``, a tuple of these records; :data:`HOMES` says which kernel stands in which file, so that
names can be listed where triton is not installed, and a file is imported when one of its kernels is asked for. Who iterates
the registry::

    twin      pure torch, in at least float32; given float64 inputs it is the oracle      (kernels/reference.py)
    launch    the Triton kernel, by the interpreter or on a GPU      must equal the twin within ``tolerance``
    compiles  what is compiled ahead of time for each target         registers, shared memory, spills
    bytes_moved, flops      what the bound of a benchmark is made of
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from refimpl.errors import ConfigError

Shape = Mapping[str, int]
"""A size for each named axis of a kernel; axes are those of :mod:`refimpl.shapes`, and a few of a kernel's own."""

TARGETS = (75, 80, 89, 90, 100)
"""Compute capabilities that kernels are compiled for: T4, A100, L4, H100 and H200, B200."""

HOMES: dict[str, str] = {
    "rms_norm": "rms_norm",
    "add_rms_norm": "rms_norm",
    "norm_heads": "head_norm",
    "rotary": "rotary",
    "silu_mul": "silu_mul",
    "linear": "linear",
    "gated_linear": "linear",
    "quantise": "fp8_quantise_spec",
    "rms_norm_quantise": "fp8_quantise_spec",
    "add_rms_norm_quantise": "fp8_quantise_spec",
    "silu_mul_quantise": "fp8_quantise_spec",
    "fp8_linear": "fp8_gemm_spec",
    "fp8_gated_linear": "fp8_gemm_spec",
    "awq_linear": "awq_gemm_spec",
    "awq_dequantise": "awq_gemm_spec",
    "write_kv": "kv_write_specs",
    "turn_and_write_kv": "kv_write_specs",
    "copy_blocks": "kv_blocks",
    "gather_blocks": "kv_blocks",
    "scatter_blocks": "kv_blocks",
    "penalise": "penalties",
    "sample": "sampling_spec",
    "verify": "rejection_spec",
    "paged_attention": "attention_specs",
    "flash_attention": "attention_specs",
}
"""The file of ``kernels/`` that each kernel stands in."""


LEAST_FOR_FP8 = 89
"""The first compute capability with arithmetic in e4m3 (NVIDIA, Ada and Hopper)."""
WITHOUT_FP8 = {
    target: f"e4m3 is a format of sm_{LEAST_FOR_FP8} and later; weights stay in 16 bits there, by linear and gated_linear"
    for target in TARGETS
    if target < LEAST_FOR_FP8
}
"""``KernelSpec.not_on`` of kernels that read or write e4m3."""


@dataclass(frozen=True)
class Tolerance:
    """``|kernel − oracle| <= atol + rtol · |oracle|`` for every element of every floating-point output."""

    rtol: float
    atol: float
    why: str
    """Which roundings make up the numbers."""


EXACT = Tolerance(0.0, 0.0, "numbers are moved, not computed")


@dataclass(frozen=True)
class Case:
    """Inputs of one call."""

    inputs: dict[str, Any]
    """What twin and kernel are given by name: tensors and numbers. The twin changes none; a kernel may say that it does."""
    out: dict[str, Any] = field(default_factory=dict)
    """What the kernel is given besides: tensors to write into, filled with NaN (-1 where they hold integers), and plans."""


@dataclass(frozen=True)
class Compile:
    """One kernel as one launch would compile it."""

    kernel: Any
    """The ``@triton.jit`` function."""
    signature: dict[str, str]
    """Type of each argument that is no constexpr, in Triton's names: ``*bf16``, ``i32``, ``fp32``."""
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    unaligned: frozenset[str] = frozenset()
    """Arguments that are not known to be multiples of 16; pointers and integers are, unless they are named here."""
    label: str = ""
    """Tells apart several compilations of one kernel."""
    fp_fusion: bool = True
    """Whether ``a · b + c`` may be one instruction, which rounds once."""
    may_spill: bool = False
    """Whether local memory may be used, which from sm_80 up no kernel should."""
    max_registers: int | None = None
    """Of a thread, where the launch says it."""


@dataclass(frozen=True)
class KernelSpec:
    """A kernel and its twin."""

    name: str
    summary: str
    axes: tuple[str, ...]
    """Names of the sizes that make a shape."""
    twin: Callable[..., Any]
    """Takes ``Case.inputs`` by name; gives the outputs as one tensor or a tuple. What a kernel changes in place is an
    output, given by the twin as a new tensor."""
    launch: Callable[..., Any]
    """Takes ``Case.inputs`` and ``Case.out`` by name and gives the same outputs, having run the kernel."""
    outputs: tuple[str, ...]
    """Names of the outputs, in order."""
    make_case: Callable[[Shape, torch.dtype, torch.device, int], Case]
    """Inputs of a shape from a seed, the same numbers on every device; memory that must not be read holds NaN."""
    small_shapes: tuple[Shape, ...]
    """For the interpreter: a few programs each, and all that is odd."""
    device_shapes: tuple[Shape, ...]
    """For a GPU and the benchmark: those of models that are served."""
    tolerance: Mapping[torch.dtype, Tolerance]
    """The dtypes that the kernel takes, and how near it comes to its twin in float64."""
    bytes_moved: Callable[[Shape, torch.dtype], int]
    """Bytes that must cross the memory bus: each input once, each output once."""
    flops: Callable[[Shape, torch.dtype], int]
    compiles: Callable[[int], tuple[Compile, ...]]
    """What to compile for a compute capability (75, 80, 89, 90, 100), as the launcher would launch it there."""
    timed_shapes: tuple[Shape, ...] = ()
    """For the benchmark alone: too large for the twin in float64."""
    not_on: Mapping[int, str] = field(default_factory=dict)
    """Targets that the kernel is not for, and why, and what is done there instead."""
    complain: Callable[[Case, dict[str, Tensor], dict[str, Tensor]], list[str]] | None = None
    """In place of a comparison by ``tolerance``: what is wrong with (case, got, oracle's outputs); nothing, if the list is
    empty. For outputs where a rounding may change more than last digits. Without it integers must be equal."""

    def named(self, outputs: Any) -> dict[str, Tensor]:
        """The outputs of ``twin`` or ``launch`` by name."""
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        return dict(zip(self.outputs, values, strict=True))

    def oracle(self, case: Case) -> dict[str, Tensor]:
        """What the twin gives in float64."""
        wide = {
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in case.inputs.items()
        }
        return self.named(self.twin(**wide))


def names() -> list[str]:
    """The names of all kernels; imports none of them."""
    return sorted(HOMES)


def get(name: str) -> KernelSpec:
    """The spec of a kernel; imports its file, and with it triton.

    Raises:
        ConfigError: there is no kernel of the name, or triton is not installed.

    """
    if name not in HOMES:
        raise ConfigError(f"there is no kernel {name!r}; there are {', '.join(names())}")
    return {spec.name: spec for spec in in_file(HOMES[name])}[name]


def in_file(home: str) -> tuple[KernelSpec, ...]:
    """The specs of one file of ``kernels/``.

    Raises:
        ConfigError: triton is not installed.

    """
    try:
        module = importlib.import_module(f"refimpl.kernels.{home}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ConfigError("kernels need triton: pip install triton (torch's CUDA builds bring it)") from error
    specs: tuple[KernelSpec, ...] = module.SPECS
    return specs


def every() -> list[KernelSpec]:
    """All specs, by name; imports triton."""
    return [get(name) for name in names()]
