"""Training what 4 bits hold, all layers at once: the quantised model learns to say what the model itself says.

The loss is the KL divergence ``Σ p log(p / q)`` of the next token's distribution, p the model's own (Liu et al. 2023,
"LLM-QAT": on text that the model writes). Two kinds of numbers are trained: scales, and levels. A level is trained as a
number between levels that is rounded in the forward pass, and whose gradient goes past the rounding (Bengio et al. 2013,
"straight-through")::

    w = s · (clamp(round(u) + z, 0, 15) − z)        z, the zero point, stays

Both are trained in units in which matrices are alike: u counts levels, and s changes by shares of itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from refimpl.executor.device import resolve_dtype
from refimpl.quantization.awq_layout import LARGEST, float16_above_0
from refimpl.quantize.dense_layers import DenseModel, Layer
from refimpl.quantize.groups import MATRICES
from refimpl.quantize.refine import Levels
from refimpl.quantize.report import LayerReport
from refimpl.quantize.source import Source

LOGITS_AT_ONCE = 2**28
"""Values of logits of one model that are there at one time."""
HELD_OUT_SHARE, HELD_OUT_TOKENS = 0.02, 16_384
"""Of the texts, and at most: they are not trained on, and say which state is kept. Of fewer than 50 texts there are none."""
LOOKS = 8
"""At what is held out: before the first step, and after each such share of them."""
WARM_UP = 0.05
"""Of the steps: learning rates rise, and fall as a cosine after."""
BESIDE = 0.9
"""Of the way from a level to the weight that it stands for, at most half a step: there numbers begin. So none is as near to
the next level as noise goes, and those of weights between two levels have the shorter way. Chosen with the
rates below by four tries of 50 steps on SmolLM2, in groups of 64."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long and how fast."""

    steps: int = 300
    tokens: int = 1_000_000
    """Of the texts that are trained on; they are seen several times where the steps take more."""
    batch_tokens: int = 16_384
    tokens_at_once: int = 16_384
    """Of a batch: as many as there is memory for."""
    level_rate: float = 5e-3
    """Levels by which a number may move in a step, about; 0: levels stay."""
    scale_rate: float = 1e-3
    """Share by which a scale may, about."""
    seed: int = 0

    @classmethod
    def asked(cls, steps: int, tokens: int, seed: int) -> Training | None:
        """As a command's options ask for it; None for 0 steps."""
        return cls(steps=steps, tokens=tokens, seed=seed) if steps else None


@dataclass(frozen=True)
class QuantisedLayer:
    """A layer in 4 bits, before it is written."""

    report: LayerReport
    tensors: dict[str, Tensor]
    """In float32, scales folded in; matrices as they were before they were rounded."""
    levels: dict[str, Levels]
    """Of each matrix, by its name in the layer."""


class _Rounding(torch.autograd.Function):
    """The weights that numbers and scales stand for."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
        """``numbers`` [O, groups, size], ``scales`` and ``zeros`` [O, groups, 1]; gives [O, C]."""
        nearest = numbers.round()
        levels = torch.clamp(nearest, -zeros, LARGEST - zeros)
        ctx.save_for_backward(levels.to(torch.int8), scales, levels == nearest)
        return (levels * scales).flatten(1).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor, None, None]:
        """Past the rounding, and not beyond the range."""
        levels, scales, within = ctx.saved_tensors
        gradient = gradients[0].view(levels.shape).float()
        numbers = (gradient * scales).mul_(within) if ctx.needs_input_grad[0] else None
        return numbers, (gradient * levels).sum(-1, keepdim=True), None, None


class TrainedMatrix:
    """A matrix in 4 bits while it is trained.

    Args:
        levels: to begin with.
        weight: what they stand for, as it was before the rounding.

    """

    def __init__(self, levels: Levels, weight: Float[Tensor, "O C"]) -> None:
        self._zeros = levels.zeros.T.float().unsqueeze(2)
        self._first = levels.scales.T.float().unsqueeze(2)
        signed = levels.values.T.float().unflatten(1, (-1, levels.group_size)) - self._zeros
        missing = (weight.float().view_as(signed) / self._first - signed).clamp_(-0.5, 0.5)
        self.numbers = (signed + BESIDE * missing).requires_grad_()
        self.growth = torch.zeros_like(self._first).requires_grad_()

    def weight(self, dtype: torch.dtype) -> Float[Tensor, "O C"]:
        """What it stands for, to be trained through."""
        rounding: Callable[..., Tensor] = _Rounding.apply
        return rounding(self.numbers, self._first * (1 + self.growth), self._zeros, dtype)

    def levels(self) -> Levels:
        """As it is stored."""
        signed = torch.clamp(self.numbers.detach().round(), -self._zeros, LARGEST - self._zeros)
        values = (signed + self._zeros).flatten(1).T.to(torch.uint8).contiguous()
        scales = float16_above_0((self._first * (1 + self.growth.detach())).squeeze(2).T).contiguous()
        return Levels(values, self._zeros.squeeze(2).T.to(torch.uint8).contiguous(), scales)


class Student:
    """The quantised model while it is trained.

    Args:
        tensors: of each layer, what is not quantised.
        matrices: of each layer, what is, by name.
        dtype: of products.

    """

    def __init__(
        self, tensors: Sequence[Layer], matrices: Sequence[Mapping[str, TrainedMatrix]], dtype: torch.dtype
    ) -> None:
        self._tensors, self.matrices, self._dtype = tensors, matrices, dtype

    def layer(self, number: int) -> dict[str, Tensor]:
        """A layer's tensors."""
        made = {f"{name}.weight": matrix.weight(self._dtype) for name, matrix in self.matrices[number].items()}
        return {**self._tensors[number], **made}

    def optimizer(self, training: Training) -> torch.optim.Adam:
        """Of scales, and of levels where they are trained."""
        every = [matrix for layer in self.matrices for matrix in layer.values()]
        groups = [{"params": [matrix.growth for matrix in every], "lr": training.scale_rate}]
        for matrix in every:
            matrix.numbers.requires_grad_(training.level_rate > 0)
        if training.level_rate > 0:
            groups.append({"params": [matrix.numbers for matrix in every], "lr": training.level_rate})
        return torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)


def trained(
    source: Source,
    layers: Sequence[QuantisedLayer],
    windows: Int[Tensor, "N L"],
    training: Training,
    device: torch.device,
    show_progress: bool = False,
) -> list[QuantisedLayer]:
    """The layers with better levels and scales. The whole model is there, in float32, five times over where levels move."""
    dtype = product_dtype(device)
    model = DenseModel(source.config, dict(source.outside_layers()), dtype, device)
    teacher = [_layer_of(source, number, dtype, device) for number in range(len(layers))]
    norms = [
        {name: source.narrowed(tensor, name).float() for name, tensor in layer.tensors.items() if not _is_matrix(name)}
        for layer in layers
    ]
    matrices = [
        {name: TrainedMatrix(levels, layer.tensors[f"{name}.weight"]) for name, levels in layer.levels.items()}
        for layer in layers
    ]
    with tqdm(total=training.steps, unit=" steps", disable=not show_progress) as bar:

        def tell(step: int, loss: float, held_out: str) -> None:
            bar.update()
            bar.set_postfix_str(f"KL divergence {loss:.4f}{held_out}")

        best = distil(model, teacher.__getitem__, Student(norms, matrices, dtype), windows.to(device), training, tell)
    return [dataclasses.replace(layer, levels=levels) for layer, levels in zip(layers, best, strict=True)]


def product_dtype(device: torch.device) -> torch.dtype:
    """Bfloat16 where the device computes in it natively, else float32: gradients in float16 would need a scaled loss."""
    return torch.bfloat16 if resolve_dtype("auto", device) == torch.bfloat16 else torch.float32


def _is_matrix(name: str) -> bool:
    return name.removesuffix(".weight") in MATRICES


def _layer_of(source: Source, number: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """A layer of the model itself."""
    start = f"model.layers.{number}."
    found = {name.removeprefix(start): tensor for name, tensor in source.weights.items() if name.startswith(start)}
    return {name: tensor.to(device, dtype if _is_matrix(name) else torch.float32) for name, tensor in found.items()}


def distil(
    model: DenseModel,
    teacher: Callable[[int], Layer],
    student: Student,
    windows: Int[Tensor, "N L"],
    training: Training,
    tell: Callable[[int, float, str], None] = lambda step, loss, held_out: None,
) -> list[dict[str, Levels]]:
    """Train the student to predict as the teacher does, on ``windows``, some of which are held out.

    Gives each layer's levels as they were when they predicted those best. ``tell`` hears each step's loss, and in words what
    the looks at the held-out texts found.
    """
    optimizer = student.optimizer(training)
    rates = [group["lr"] for group in optimizer.param_groups]
    length = windows.shape[1]
    windows, held_out = split(windows)
    best = _Best(model, teacher, student, held_out, max(1, training.tokens_at_once // length))
    rows, at_once = max(1, training.batch_tokens // length), max(1, training.tokens_at_once // length)
    drawn = _drawn(len(windows), training.seed)
    between = -(-training.steps // LOOKS)
    best.look()
    for step in range(training.steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share_of_rate(step / training.steps)
        batch = windows[torch.tensor([next(drawn) for _ in range(rows)])]
        losses = [_backward(model, teacher, student, part, batch.numel()) for part in batch.split(at_once)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % between == 0 or step + 1 == training.steps:
            best.look()
        tell(step, float(sum(losses)), str(best))
    return best.levels


def split(windows: Int[Tensor, "N L"]) -> tuple[Int[Tensor, "M L"], Int[Tensor, "H L"]]:
    """What is trained on, and what is held out: windows at equal distances, so that there are some of every kind."""
    count = min(int(HELD_OUT_SHARE * len(windows)), HELD_OUT_TOKENS // windows.shape[1])
    held_out = torch.zeros(len(windows), dtype=torch.bool, device=windows.device)
    held_out[[i * len(windows) // count for i in range(count)]] = True
    return windows[~held_out], windows[held_out]


class _Best:
    """The student's levels as they were when they predicted texts best; without texts, as they were last."""

    def __init__(
        self,
        model: DenseModel,
        teacher: Callable[[int], Layer],
        student: Student,
        windows: Int[Tensor, "N L"],
        at_once: int,
    ) -> None:
        self._model, self._teacher, self._student = model, teacher, student
        self._windows, self._parts = windows, windows.split(at_once) if len(windows) else ()
        self._last = self._least = math.inf
        self.levels: list[dict[str, Levels]] = []

    def __str__(self) -> str:
        return f", held out {self._last:.4f}, least {self._least:.4f}" if self._parts else ""

    @torch.no_grad()
    def look(self) -> None:
        """Keep the levels if none were better."""
        hidden, tokens = self._model.hidden, self._windows.numel()
        pairs = ((hidden(self._teacher, part), hidden(self._student.layer, part)) for part in self._parts)
        self._last = float(sum(divergence(self._model.head, *pair, tokens)[0] for pair in pairs))
        if self._last <= self._least:
            self._least = self._last
            self.levels = [{name: one.levels() for name, one in layer.items()} for layer in self._student.matrices]


def share_of_rate(progress: float) -> float:
    """Of the learning rate, after such a share of the steps."""
    if progress < WARM_UP:
        return (progress + WARM_UP / 10) / (1.1 * WARM_UP)
    return 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


def _drawn(count: int, seed: int) -> Any:
    """Numbers below ``count``, each once, then each once more in another order, and so on."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def _backward(
    model: DenseModel, teacher: Callable[[int], Layer], student: Student, windows: Int[Tensor, "N L"], tokens: int
) -> Tensor:
    """Add the gradients of some texts of a batch of so many tokens; gives their part of its loss."""
    with torch.no_grad():
        expected = model.hidden(teacher, windows)
    with torch.enable_grad():
        hidden = model.hidden(student.layer, windows)
    loss, gradient = divergence(model.head, expected, hidden.detach(), tokens)
    hidden.backward(gradient)
    return loss


@torch.no_grad()
def divergence(
    head: Float[Tensor, "V H"], expected: Float[Tensor, "T H"], found: Float[Tensor, "T H"], tokens: int
) -> tuple[Float[Tensor, ""], Float[Tensor, "T H"]]:
    """KL divergence between two models' predictions, as a mean over ``tokens``, and its gradient at the states ``found``.

    The gradient at q's logits is ``q − p``: logits are made in parts, and none is kept.
    """
    rows = max(1, LOGITS_AT_ONCE // len(head))
    loss, gradients = torch.zeros((), device=found.device), []
    for wanted, made in zip(expected.split(rows), found.split(rows), strict=True):
        p = (wanted.to(head.dtype) @ head.T).float().log_softmax(-1)
        q = (made.to(head.dtype) @ head.T).float().log_softmax(-1)
        share = p.exp()
        loss += (share * (p - q)).sum() / tokens
        gradients.append(((q.exp_() - share).to(head.dtype) @ head).float() / tokens)
    return loss, torch.cat(gradients)
