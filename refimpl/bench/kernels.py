"""Every kernel of the registry on its served shapes: microseconds, bytes, and the share of what the device can do.

A launch is timed by replaying a CUDA graph of many, so that the host's part is in none of them. The launches of a graph go
through copies of the inputs that together are twice the second-level cache, so that each finds its inputs in memory, as a
step of a model does that has read gigabytes of weights since. Ceilings are measured in the same run: bytes a second of
reading and of copying, and floating-point operations a second of a matrix product. No kernel can take less than the longer
of its bytes by the one and its operations by the other; its share is that time over its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from refimpl.bench.kernel_checks import IN_4_BITS, MOVED, MOVERS, checks_of
from refimpl.bench.peer_attention import ATTENTION, FlashAttentionPeer
from refimpl.bench.result import Result, setting, workload_hash
from refimpl.errors import ConfigError
from refimpl.kernels import spec as registry
from refimpl.kernels.spec import Case, KernelSpec, Shape

GIB = 2**30
MOST_COPIES = 64
"""Of a case's inputs; with so many, inputs under a megabyte or so still lie in the cache, which is told of each."""
MOST_BYTES = 16 * GIB
"""That the copies may take."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The first of them that a kernel takes, and the device computes in, is measured."""


def run(names: Sequence[str] = (), repeats: int = 20, compare: bool = False) -> Result:
    """Measure the named kernels, or all, on the first GPU; with ``compare`` FlashAttention beside those of attention.

    Raises:
        ConfigError: there is no GPU, no triton, no kernel of a name, or no FlashAttention to compare with.

    """
    if not torch.cuda.is_available():
        raise ConfigError(
            f"bench kernels needs a GPU, and torch {torch.__version__} sees none here; kernels run on GPUs only"
        )
    device = torch.device("cuda", 0)
    specs = [registry.get(name) for name in names or registry.names()]
    peer = FlashAttentionPeer(device) if compare else None
    ceilings = measure_ceilings(device, repeats)
    work = [(spec, shape) for spec in specs for shape in (*spec.device_shapes, *spec.timed_shapes)]
    rows = [
        measure(spec, shape, device, repeats, ceilings, peer)
        for spec, shape in tqdm(work, desc="kernels", unit="shape", leave=False)
    ]
    return Result(
        topic="kernels",
        setting=setting(
            model="no model",
            model_hash="none",
            dtype="as told of each",
            triton=version("triton"),
            workload=f"{len(work)} shapes of {len(specs)} kernels, each the median of {repeats} replays",
            workload_hash=workload_hash([(spec.name, dict(shape)) for spec, shape in work]),
            tokens_produced=0,
        ),
        results={"ceilings": ceilings, "peer": peer.title if peer else "none", "kernels": rows},
        checks=checks_of(rows),
    )


def measure(
    spec: KernelSpec,
    shape: Shape,
    device: torch.device,
    repeats: int,
    ceilings: dict[str, float],
    peer: FlashAttentionPeer | None = None,
) -> dict[str, Any]:
    """The figures of one kernel at one shape, and the peer's beside those of attention."""
    native = torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = next(one for one in DTYPES if one in spec.tolerance and (native or one != torch.bfloat16))
    moved, flops = spec.bytes_moved(shape, dtype), spec.flops(shape, dtype)
    copies = cold_copies(spec, shape, dtype, device)
    microseconds = time_launches([_launching(spec, case) for case in copies], repeats)
    beside = {}
    if spec.name in MOVERS and moved >= MOVED:
        beside["copy_microseconds"] = time_copies(moved, len(copies), device, repeats)
    if spec.name in IN_4_BITS:
        beside["library_microseconds"] = time_product(shape, dtype, device, repeats)
    if peer and spec.name in ATTENTION and peer.takes(copies[0]):
        beside["peer_microseconds"] = time_launches([peer.launching(case) for case in copies], repeats)
    bound = max(moved / ceilings["bytes_per_second"], flops / ceilings["flops_per_second"]) * 1e6
    return {
        "kernel": spec.name,
        "shape": dict(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "microseconds": microseconds,
        "bytes": moved,
        "flops": flops,
        "bound_microseconds": bound,
        "share": bound / microseconds,
        "cold": len(copies) * moved >= 2 * _cache_bytes(device),
    } | beside


def _launching(spec: KernelSpec, case: Case) -> Callable[[], Any]:
    return lambda: spec.launch(**case.inputs, **case.out)


def _cache_bytes(device: torch.device) -> int:
    size: int = torch.cuda.get_device_properties(device).L2_cache_size
    return size


def cold_copies(spec: KernelSpec, shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """So many cases of a shape that what they move is twice the second-level cache, as far as memory allows."""
    first = spec.make_case(shape, dtype, device, 0)
    tensors = [value for value in (*first.inputs.values(), *first.out.values()) if isinstance(value, Tensor)]
    size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    wanted = -(-2 * _cache_bytes(device) // max(spec.bytes_moved(shape, dtype), 1))
    count = max(1, min(wanted, MOST_COPIES, MOST_BYTES // max(size, 1)))
    return [first, *(spec.make_case(shape, dtype, device, seed) for seed in range(1, count))]


def time_launches(launches: Sequence[Callable[[], Any]], repeats: int) -> float:
    """Microseconds of one of the launches on the current device: the median over replays of a graph of them all."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for launch in launches:  # compiles, and lets libraries set themselves up, which a capture does not allow
            launch()
    torch.cuda.current_stream().wait_stream(side)
    rounds = max(1, 32 // len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    times: list[float] = []
    for turn in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(start.elapsed_time(end))
    return float(statistics.median(times)) * 1e3 / (rounds * len(launches))


def time_copies(size: int, copies: int, device: torch.device, repeats: int) -> float:
    """Microseconds of reading and writing ``size`` bytes in all, by a kernel that only copies; in turn so many pairs."""
    pairs = [[torch.ones(size // 8, device=device) for _ in range(2)] for _ in range(max(2, copies))]
    return time_launches([partial(torch.mul, source, 1.0, out=target) for source, target in pairs], repeats)


def time_product(shape: Shape, dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    """Microseconds of a library's product of the same sizes with weights in ``dtype``, which no cache holds."""
    out_features, in_features = shape["out_features"], shape["in_features"]
    x = torch.randn(shape["T"], in_features, device=device).to(dtype)
    copies = max(1, min(MOST_COPIES, 2 * _cache_bytes(device) // max(1, out_features * in_features * dtype.itemsize)))
    weights = [torch.full((out_features, in_features), 0.02, dtype=dtype, device=device) for _ in range(copies)]
    return time_launches([partial(torch.nn.functional.linear, x, weight) for weight in weights], repeats)


def measure_ceilings(device: torch.device, repeats: int) -> dict[str, float]:
    """What the device can do: bytes a second read, and read and written; operations a second of a 16-bit product.

    ``bytes_per_second`` is the larger of the first two; ``launch_microseconds`` is what a launch takes that does nothing.
    """
    source, target = (torch.ones(GIB // 4, dtype=torch.float32, device=device) for _ in range(2))
    reading = time_launches([lambda: source.amax()], repeats)
    # By a kernel: a copy within a graph is done by a copy engine, which is slower.
    copying = time_launches([lambda: torch.mul(source, 1.0, out=target)], repeats)
    nothing = torch.ones(1, device=device)
    launch = time_launches([lambda: nothing.zero_()], repeats)
    side = 8192
    left, right = (torch.randn(side, side, dtype=torch.float16, device=device) for _ in range(2))
    product = time_launches([lambda: left @ right], max(3, repeats // 4))
    size = source.numel() * source.element_size()
    read, copy = size / reading * 1e6, 2 * size / copying * 1e6
    return {
        "read_bytes_per_second": read,
        "copy_bytes_per_second": copy,
        "bytes_per_second": max(read, copy),
        "flops_per_second": 2 * side**3 / product * 1e6,
        "launch_microseconds": launch,
    }
