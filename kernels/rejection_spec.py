"""How the check of drafted tokens is registered: its cases, and what rounding may do to a verdict."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from refimpl.kernels import cases, reference, rejection_reference
from refimpl.kernels.launch import dtypes_for, pointer, power_of_two
from refimpl.kernels.philox import Purpose, uniform
from refimpl.kernels.rejection import ACCEPT_WARPS, accept_kernel, redraw_kernel, residual_kernel, verify
from refimpl.kernels.sampling import NUM_WARPS, TILE
from refimpl.kernels.spec import Case, Compile, KernelSpec, Shape, Tolerance

EDGE = 1e-6
"""How near to the edge of two tokens, in probability, a uniform number must lie for rounding to excuse the other one."""
RATIO_EDGE = 2e-5
"""The same of p/q; each is the exponential of a float32 that may be as low as −29."""


def _case(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    """Drafts that know something of the target, one of four the target itself; sequences greedy and hot, of all K."""
    S, K, V = shape["S"], shape["K"], shape["V"]
    random = cases.generator(seed)
    order = torch.randperm(S * (K + 1), generator=random)

    def choice(*options: float, dtype: torch.dtype) -> Tensor:
        chosen = torch.tensor(options)[torch.randint(0, len(options), (S,), generator=random)]
        return chosen.to(dtype).repeat_interleave(K + 1)[order].to(device)

    target = torch.randn(S, K + 1, V, generator=random) * 3
    target[..., ::7] = target[..., ::7].round()  # ties
    draft = target[:, :K] + torch.randn(S, K, V, generator=random)
    draft[::4] = target[::4, :K]
    raw = target.clone()
    target[..., 1::5] = draft[..., 1::5] = -math.inf
    gumbel = -torch.rand(S, K, V, generator=random).clamp(min=1e-9).log().neg().log()
    draft_ids = (draft + gumbel).argmax(-1) if V and K else torch.zeros(S, K, dtype=torch.int64)
    num_drafts = torch.randint(0, K + 1, (S,), generator=random)
    num_drafts[::2] = K
    if shape.get("spoilt"):
        raw[0::4, -1] = target[0::4, -1] = math.nan  # the row behind the drafts
        target[1::4, 0] = -math.inf
        draft[2::4, 0, 3] = math.inf
        draft_ids[3::4, 0] = V
    words = [torch.randint(-(2**63), 2**63 - 1, (S,), generator=random).repeat_interleave(K + 1) for _ in range(2)]
    first = torch.randint(0, 2**20, (S, 1), generator=random)
    rows = order.argsort().view(S, K + 1)  # in any order, and padding repeats what is another's
    if S:
        rows[torch.arange(K + 1) > num_drafts[:, None]] = rows[0, 0]
    inputs = {
        "logits": target.flatten(0, 1)[order].to(dtype).to(device),
        "rows": rows.to(device),
        "draft_ids": draft_ids.to(device),
        "draft_logits": draft.to(dtype).to(device),
        "num_drafts": num_drafts.to(device),
        "temperature": choice(0.0, 0.7, 1.0, 1.0, 1.7, dtype=torch.float32),
        "seed": words[0][order].to(device),
        "path": words[1][order].to(device),
        "position": (first + torch.arange(K + 1)).flatten()[order].to(device),
    }
    if shape.get("adjusted"):
        inputs["raw"] = raw.flatten(0, 1)[order].to(dtype).to(device)
    if shape.get("filtered"):
        inputs["top_k"] = choice(-1, 0, 5, 40, 2 * V, dtype=torch.int64)
        inputs["top_p"] = choice(0.5, 0.95, 1.0, 1.0, dtype=torch.float32)
        inputs["min_p"] = choice(0.0, 0.0, 0.05, dtype=torch.float32)
    out = {
        "token_ids": torch.full((S, K + 1), -9, dtype=torch.int64, device=device),
        "num_accepted": torch.full((S,), -9, dtype=torch.int64, device=device),
    }
    return Case(inputs, out)


def _complain(case: Case, got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Verdicts must be the oracle's but where a uniform number lies on an edge."""
    differs = (got["token_ids"] != expected["token_ids"]).any(-1) | (got["num_accepted"] != expected["num_accepted"])
    found = []
    for s in differs.nonzero().flatten().tolist():
        told = [f"{one['token_ids'][s].tolist()} ({int(one['num_accepted'][s])} accepted)" for one in (got, expected)]
        if not _on_an_edge(case, s, got, expected):
            found.append(f"sequence {s} came to {told[0]}, not {told[1]}, and no number of its lies on an edge")
    if int(differs.sum()) > max(1, len(differs) // 50):
        found.append(f"{int(differs.sum())} of {len(differs)} sequences are on an edge: more than chance brings")
    return found


def _on_an_edge(case: Case, s: int, got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether rounding excuses that a sequence's verdict is another."""
    i = int(torch.minimum(got["num_accepted"][s], expected["num_accepted"][s]))
    row, token = int(case.inputs["rows"][s, i]), int(got["token_ids"][s, i])
    temperature = case.inputs["temperature"]
    if token < 0 or temperature[row] < reference.GREEDY_BELOW:
        return False
    filters = tuple(case.inputs[name] for name in ("top_k", "top_p", "min_p")) if "top_k" in case.inputs else None
    p = rejection_reference.law(case.inputs["logits"][row].double(), row, temperature, filters)
    is_draft = i < int(case.inputs["num_drafts"][s])
    q = p
    if is_draft:
        q = rejection_reference.law(case.inputs["draft_logits"][s, i].double(), row, temperature, filters)
    seed, path, position = (case.inputs[name][row : row + 1] for name in ("seed", "path", "position"))
    if got["num_accepted"][s] != expected["num_accepted"][s]:
        draft = int(case.inputs["draft_ids"][s, i])
        ratio = float(p[draft] / q[draft])
        return abs(uniform(seed, path, position, Purpose.ACCEPT).item() - ratio) <= RATIO_EDGE * max(1.0, ratio)
    weights = (p - q).clamp(min=0) if is_draft else p
    cumulative = weights.cumsum(0) / weights.sum()
    u = uniform(seed, path, position, Purpose.TARGET).item()
    start = float(cumulative[token - 1]) if token else 0.0
    return max(start - u, u - float(cumulative[token])) <= EDGE / float(weights.sum())


def _bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Logits of both sides once, and raw logits where they differ."""
    rows = shape["S"] * (shape["K"] + 1) * (2 if shape.get("adjusted") else 1)
    return (rows + shape["S"] * shape["K"]) * shape["V"] * dtype.itemsize


def _compiles(capability: int) -> tuple[Compile, ...]:
    constants = {"FILTERED": True, "TILES": power_of_two(128_256 // TILE)}
    logits = pointer(dtypes_for(capability)[0])
    types = dict.fromkeys(("temperature", "peaks", "cuts", "draft_peaks", "draft_cuts"), "*fp32")
    types |= dict.fromkeys(("cut_ids", "draft_cut_ids", "rejected"), "*i32")
    types |= dict.fromkeys(("masses", "draft_masses", "residuals", "seed", "path", "position"), "*i64")
    types |= dict.fromkeys(("draft_ids", "rows", "num_drafts", "own_ids", "token_ids", "num_accepted"), "*i64")
    types |= {"target": logits, "draft": logits}
    found = []
    for kernel in (accept_kernel, residual_kernel, redraw_kernel):
        given = constants if kernel is accept_kernel else constants | {"TILE": TILE}
        signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in given}
        label, odd = kernel.__name__.removesuffix("_kernel"), frozenset({"num_tiles", "K", "purpose"})
        warps = ACCEPT_WARPS if kernel is accept_kernel else NUM_WARPS
        found.append(Compile(kernel, signature, given, warps, unaligned=odd, label=label, fp_fusion=False))
    return tuple(found)


SPECS = (
    KernelSpec(
        name="verify",
        summary="the check of drafted tokens: what is accepted, and the one token drawn",
        axes=("S", "K", "V", "adjusted", "filtered", "spoilt"),
        twin=rejection_reference.verify,
        launch=verify,
        outputs=("token_ids", "num_accepted"),
        make_case=_case,
        small_shapes=(
            {"S": 0, "K": 2, "V": 8},
            {"S": 1, "K": 0, "V": 9},
            {"S": 2, "K": 2, "V": 60},
            {"S": 2, "K": 1, "V": TILE + 1},
            {"S": 2, "K": 1, "V": 333, "filtered": 1},
            {"S": 4, "K": 1, "V": 80, "adjusted": 1, "spoilt": 1},
        ),
        device_shapes=(
            {"S": 1, "K": 5, "V": 128_256},
            {"S": 1, "K": 5, "V": 128_256, "filtered": 1},
            {"S": 64, "K": 3, "V": 128_256},
            {"S": 64, "K": 3, "V": 128_256, "filtered": 1, "spoilt": 1},
            {"S": 16, "K": 8, "V": 49_152, "adjusted": 1},
        ),
        tolerance={
            dtype: Tolerance(0.0, 0.0, "verdicts exact, but where a uniform number lies on an edge")
            for dtype in (torch.float32, torch.bfloat16)
        },
        bytes_moved=_bytes,
        flops=lambda shape, dtype: 6 * shape["S"] * (2 * shape["K"] + 1) * shape["V"],
        compiles=_compiles,
    ),
)
