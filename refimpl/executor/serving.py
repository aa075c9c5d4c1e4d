"""Which kernel serves what on a device, and why: the engine's own choices, told before or after they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from refimpl.attention import LEAST_FOR_PREFILL, Setting, backend_choice
from refimpl.attention.backend import RecordsPrompts
from refimpl.config import EngineArgs
from refimpl.executor.cuda_graphs import graph_sizes
from refimpl.executor.mixed_graphs import mixed_sizes, recorded_sets
from refimpl.kernels import native
from refimpl.kernels.awq_reference import most_tokens
from refimpl.kernels.by_triton import obstacle


class Served(NamedTuple):
    """Who computes an operation, and why."""

    operation: str
    by: str
    why: str


def who_serves(args: EngineArgs, setting: Setting, quantization: str | None = None) -> list[Served]:
    """Every operation that has more than one way to be computed.

    ``quantization`` is the method that the weights are held by, where a checkpoint decides; else the option's counts.
    """
    rest = obstacle(setting.device, setting.dtype)
    by, why = ("torch", rest) if rest else ("Triton kernels", f"sm_{setting.capability}")
    return [
        *_attention(args.attention_backend, setting),
        _between_products(setting, by, why),
        Served("sampling", by, why),
        *_quantised(quantization or args.quantization, setting, rest),
        *_graphs(args.attention_backend, setting, args.enforce_eager, args.step_limits()),
    ]


def in_a_line(served: Sequence[Served]) -> str:
    """All of it for a log: operations that are served alike are named together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for operation, by, why in served:
        groups.setdefault((by, why), []).append(operation)
    return "; ".join(f"{', '.join(operations)}: {by} ({why})" for (by, why), operations in groups.items())


def graphs_choice(attention_backend: Any, setting: Setting, enforce_eager: bool) -> tuple[bool, str]:
    """Whether steps of decodes are recorded as CUDA graphs, and why."""
    if setting.device.type != "cuda":
        return False, "the device is a CPU"
    if enforce_eager:
        return False, "enforce_eager=True"
    name = backend_choice(attention_backend, setting).name
    on_device = (
        name == "triton" if isinstance(attention_backend, str) else getattr(attention_backend, "decodes_on_device", False)
    )
    if not on_device:
        return False, f"the attention backend {name} plans each step on the host"
    return True, "a step of decodes needs nothing from the host"


def mixed_graphs_choice(attention_backend: Any, setting: Setting, enforce_eager: bool) -> tuple[bool, str]:
    """The same of steps with prompts."""
    wanted, why = graphs_choice(attention_backend, setting, enforce_eager)
    if not wanted:
        return False, why
    if isinstance(attention_backend, str):
        on_device = setting.capability >= LEAST_FOR_PREFILL
    else:
        on_device = isinstance(attention_backend, RecordsPrompts) and attention_backend.prompts_on_device
    if not on_device:
        return False, "their attention is planned on the host"
    return True, "the host cuts the prompts into tiles beforehand"


def compiles_kernels(attention_backend: Any, setting: Setting) -> bool:
    """Whether steps run by Triton kernels that can be compiled ahead: not if somebody's own backend takes part in them."""
    return (
        setting.device.type == "cuda" and isinstance(attention_backend, str) and not obstacle(setting.device, setting.dtype)
    )


def _attention(attention_backend: Any, setting: Setting) -> list[Served]:
    name, why = backend_choice(attention_backend, setting)
    if name == "native" and isinstance(attention_backend, str):
        prompts = "prompts multiply large matrices"
        return [
            Served("decode attention", "compiled operations", native.WHY),
            Served("prefill attention", "torch, on gathered pages", prompts),
        ]
    if name != "triton" or not isinstance(attention_backend, str):
        kind = "torch, on gathered pages" if name == "torch" else name
        return [Served("decode attention", kind, why), Served("prefill attention", kind, why)]
    if setting.device.type != "cuda":
        interpreted = "interpreted: the device is a CPU"
        return [
            Served("decode attention", "kernel paged_attention", interpreted),
            Served("prefill attention", "kernel flash_attention", interpreted),
        ]
    capability = f"sm_{setting.capability}"
    if setting.capability >= LEAST_FOR_PREFILL:
        return [
            Served("decode attention", "kernel paged_attention", capability),
            Served("prefill attention", "kernel flash_attention", capability),
        ]
    lacking = f"{capability}: Triton has products on tensor cores from sm_{LEAST_FOR_PREFILL} on"
    return [
        Served("decode attention", "kernel paged_attention", f"{lacking}; by vector arithmetic"),
        Served("prefill attention", "torch, on gathered pages", lacking),
    ]


def _between_products(setting: Setting, by: str, why: str) -> Served:
    """Norms and what else lies between products: on a CPU with a compiler by operations of its own."""
    operation = "norms, rotary embedding, SwiGLU"
    if setting.device.type != "cpu":
        return Served(operation, by, why)
    if native.obstacle_for(setting.dtype):
        return Served(operation, "torch", native.without(setting.dtype))
    return Served(operation, "compiled operations", native.WHY)


def _graphs(
    attention_backend: Any, setting: Setting, enforce_eager: bool, step_limits: tuple[int, int]
) -> tuple[Served, Served]:
    rows, tokens = graph_sizes(step_limits[0]), mixed_sizes(step_limits[1])
    num_mixed = sum(len(sizes) for _, sizes in recorded_sets(tokens, rows[-1]))
    decodes, decodes_why = graphs_choice(attention_backend, setting, enforce_eager)
    mixed, mixed_why = mixed_graphs_choice(attention_backend, setting, enforce_eager)
    eager = "kernel by kernel, no CUDA graphs"
    return (
        Served("steps of decodes", f"{len(rows)} CUDA graphs, for up to {rows[-1]} sequences", decodes_why)
        if decodes
        else Served("steps of decodes", eager, decodes_why),
        Served("steps with prompts", f"{num_mixed} CUDA graphs, for up to {tokens[-1]:,} tokens", mixed_why)
        if mixed
        else Served("steps with prompts", eager, mixed_why),
    )


def _quantised(quantization: str | None, setting: Setting, obstacle_to_kernels: str) -> list[Served]:
    if quantization is None:
        return []
    if quantization != "fp8":
        return _in_4_bits(setting, obstacle_to_kernels)
    if setting.device.type != "cuda":
        why = "slow: a CPU has no FP8 arithmetic, so each product widens its weights"
        return [Served("products of FP8 weights", "torch", why)]
    if obstacle_to_kernels:
        return [Served("products of FP8 weights", "torch, on widened weights", obstacle_to_kernels)]
    by = "kernel fp8_linear up to 64 or 128 tokens, torch._scaled_mm beyond"
    return [Served("products of FP8 weights", by, f"sm_{setting.capability}")]


def _in_4_bits(setting: Setting, obstacle_to_kernels: str) -> list[Served]:
    operation = "products of 4-bit weights"
    if setting.device.type != "cuda":
        why = "a CPU has none of 4 bits: weights are widened to dtype, once where memory allows, else for each product"
        return [Served(operation, "torch, on widened weights", why)]
    if obstacle_to_kernels:
        return [Served(operation, "torch, on weights widened for each product", obstacle_to_kernels)]
    by = "a library's, with weights written out"
    if setting.dtype.itemsize == 2:
        by = f"kernel awq_linear up to {most_tokens(setting.capability)} tokens, beyond {by} in 16 bits"
    return [Served(operation, by, f"sm_{setting.capability}")]
