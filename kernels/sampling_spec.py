"""How the sampling kernels are registered: their cases, and what rounding may do to a token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from refimpl.kernels import cases, reference
from refimpl.kernels.launch import dtypes_for, pointer, power_of_two
from refimpl.kernels.philox import Purpose, uniform
from refimpl.kernels.sampling import NUM_WARPS, TILE, draw_kernel, sample, tile_statistics_kernel
from refimpl.kernels.sampling_cut import PART, PASS, PIVOTS, cut_kernel, shorten_kernel, survey_kernel
from refimpl.kernels.spec import Case, Compile, KernelSpec, Shape, Tolerance

EDGE = 1e-6
"""How near to the edge between two tokens a uniform number must lie for rounding to excuse the other one."""


def _case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    """Rows of every kind in turn: greedy, hot, filtered; some with NaN, with nothing left, with ties throughout."""
    R, V = shape["R"], shape["V"]
    random = cases.generator(seed)

    def choice(*options: float, dtype: torch.dtype) -> Tensor:
        chosen = torch.tensor(options)[torch.randint(0, len(options), (R,), generator=random)]
        return chosen.to(dtype).to(device)

    logits = torch.randn(R, V, generator=random) * 4
    logits[:, ::7] = logits[:, ::7].round()  # ties
    raw = logits.clone()
    logits[:, 1::5] = -math.inf
    spoilt = torch.arange(R) if shape.get("spoilt") else torch.arange(0)
    for kind, value in enumerate((math.nan, math.inf)):
        raw[spoilt[kind::4], -1] = logits[spoilt[kind::4], -1] = value
    logits[spoilt[2::4]] = -math.inf
    logits[spoilt[3::4]] = raw[spoilt[3::4]] = 1.5
    words = [torch.randint(-(2**63), 2**63 - 1, (R,), generator=random).to(device) for _ in range(2)]
    inputs = {
        "logits": cases.spaced(logits.to(dtype).to(device), shape.get("gap", 0)),
        "temperature": choice(0.0, 0.7, 1.0, 1.0, 1.7, dtype=torch.float32),
        "seed": words[0],
        "path": words[1],
        "position": torch.randint(0, 2**20, (R,), generator=random).to(device),
        "purpose": int(Purpose.TARGET),
    }
    if shape.get("adjusted"):
        inputs["raw"] = raw.to(dtype).to(device)
    if shape.get("filtered"):
        inputs["top_k"] = choice(-1, 0, 1, 5, 40, 2 * V, dtype=torch.int64)
        inputs["top_p"] = choice(0.1, 0.5, 0.95, 1.0, 1.0, dtype=torch.float32)
        inputs["min_p"] = choice(0.0, 0.0, 0.05, dtype=torch.float32)
    out = {
        "token_ids": cases.poisoned(R, dtype=torch.int64, device=device),
        "logprobs": cases.poisoned(R, dtype=torch.float32, device=device),
    }
    return Case(inputs, out)


def _complain(case: Case, got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Tokens must be the oracle's but where the uniform number lies on an edge, log-probabilities those of their tokens."""
    token_ids, wanted = got["token_ids"], expected["token_ids"]
    raw = case.inputs.get("raw", case.inputs["logits"]).double()
    found = []
    other = (token_ids != wanted).nonzero().flatten().tolist()
    for row in other:
        distance = _distance_from_edge(case, row, int(token_ids[row]))
        if not distance <= EDGE:
            found.append(f"row {row} drew {token_ids[row]}, not {wanted[row]}; its uniform number lies {distance:g} off")
    if len(other) > max(1, len(token_ids) // 50):
        found.append(f"{len(other)} of {len(token_ids)} rows are on an edge: more than chance brings")
    drew = token_ids.clamp(min=0).unsqueeze(-1)
    logprobs = raw.log_softmax(-1).gather(-1, drew).squeeze(-1).masked_fill(token_ids < 0, math.nan)
    good = torch.isclose(got["logprobs"].double(), logprobs, rtol=1e-6, atol=2e-5, equal_nan=True)
    return found + [f"logprob of row {row} is {got['logprobs'][row]}, not {logprobs[row]}" for row in (~good).nonzero()]


def _distance_from_edge(case: Case, row: int, token: int) -> float:
    """How far, in probability, a row's uniform number lies from the interval of a token; infinite for greedy rows."""
    one = {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in case.inputs.items()}
    if token < 0 or one["temperature"].item() < reference.GREEDY_BELOW:
        return math.inf
    logits = one["logits"].double()
    masses = ((logits - logits.amax()) / one["temperature"].double()).exp()
    if "top_k" in one:
        masses = reference.kept_masses(masses.log(), one["top_k"], one["top_p"].double(), one["min_p"].double())
    cumulative = masses.flatten().cumsum(0) / masses.sum()
    u = uniform(one["seed"], one["path"], one["position"], Purpose(int(one["purpose"]))).item()
    start = cumulative[token - 1].item() if token else 0.0
    return max(start - u, u - cumulative[token].item(), 0.0)


def _bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Logits once, and raw logits where they differ."""
    return shape["R"] * shape["V"] * dtype.itemsize * (2 if shape.get("adjusted") else 1)


def _compiles(capability: int) -> tuple[Compile, ...]:
    tiles = {"TILES": power_of_two(128_256 // TILE), "TILE": TILE}
    parts = {"TILES": tiles["TILES"], "PIVOTS": PIVOTS, "PARTS": power_of_two(128_256 // PART)}
    constants = {
        tile_statistics_kernel: {"ADJUSTED": True, "TILE": TILE},
        survey_kernel: {"TILES": tiles["TILES"], "PIVOTS": PIVOTS, "PART": PART},
        shorten_kernel: parts | {"PART": PART},
        cut_kernel: tiles | parts | {"PASS": PASS},
        draw_kernel: tiles | {"FILTERED": True},
    }
    logits = pointer(dtypes_for(capability)[0])
    types = dict.fromkeys(
        ("temperature", "top_p", "min_p", "peaks", "cuts", "raw_peaks", "raw_masses", "logprobs", "short", "shorts"), "*fp32"
    )
    types |= dict.fromkeys(("seed", "path", "position", "top_k", "amounts", "masses", "token_ids"), "*i64")
    types |= {"logits": logits, "raw": logits, "peak_ids": "*i32", "cut_ids": "*i32", "counts": "*i32", "short_ids": "*i32"}
    found = []
    for kernel, compiled in constants.items():
        signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in compiled}
        odd = frozenset({"num_tiles", "num_parts", "purpose"})
        label = kernel.__name__.removesuffix("_kernel")
        found.append(Compile(kernel, signature, compiled, NUM_WARPS, unaligned=odd, label=label, fp_fusion=False))
    return tuple(found)


SPECS = (
    KernelSpec(
        name="sample",
        summary="a token a row, and its log-probability",
        axes=("R", "V", "gap", "adjusted", "filtered", "spoilt"),
        twin=reference.sample,
        launch=sample,
        outputs=("token_ids", "logprobs"),
        make_case=_case,
        small_shapes=(
            {"R": 0, "V": 8},
            {"R": 1, "V": 1, "filtered": 1},
            {"R": 6, "V": 333, "gap": 5},
            {"R": 6, "V": 333, "adjusted": 1, "filtered": 1},
            {"R": 4, "V": 80, "adjusted": 1, "filtered": 1, "spoilt": 1},
            {"R": 4, "V": TILE + 1},
            {"R": 3, "V": TILE + 1, "filtered": 1},
        ),
        device_shapes=(
            {"R": 1, "V": 128_256},
            {"R": 64, "V": 128_256},
            {"R": 256, "V": 128_256, "adjusted": 1},
            {"R": 64, "V": 128_256, "filtered": 1},
            {"R": 256, "V": 128_256, "filtered": 1, "spoilt": 1},
            {"R": 256, "V": 49_152, "filtered": 1, "adjusted": 1},
        ),
        tolerance={
            dtype: Tolerance(1e-6, 2e-5, "log-probabilities by sums of float32; tokens exact, but on an edge")
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        },
        bytes_moved=_bytes,
        flops=lambda shape, dtype: 6 * shape["R"] * shape["V"],
        compiles=_compiles,
    ),
)
