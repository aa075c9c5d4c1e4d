"""Training what few bits hold, all layers at once: the quantised model learns to say what the model itself says.

The loss is the KL divergence ``Σ p log(p / q)`` of the next token's distribution, p the model's own (Liu et al. 2023,
"LLM-QAT": on text that the model writes). What is trained of a matrix is told in :mod:`refimpl.quantize.trained_levels` and
:mod:`refimpl.quantize.trained_fp8`: numbers that are rounded in the forward pass, and whose gradient goes past the rounding
(Bengio et al. 2013, "straight-through"). They count steps between what the bits can hold, so that matrices are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from refimpl.executor.device import resolve_dtype
from refimpl.quantize.dense_layers import DenseModel, Layer, as_they_are
from refimpl.quantize.groups import MATRICES
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
rates below by four tries of 50 steps on SmolLM2, in 4 bits in groups of 64."""


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


Stored = TypeVar("Stored", covariant=True)
"""A matrix as it is stored."""


class TrainedMatrix(Protocol[Stored]):
    """A matrix in few bits while it is trained."""

    def weight(self, dtype: torch.dtype) -> Float[Tensor, "O C"]:
        """What it stands for, to be trained through."""
        ...

    def parameters(self, training: Training) -> list[tuple[Tensor, float]]:
        """What is trained of it, and how fast."""
        ...

    def stored(self) -> Stored:
        """As it is stored."""
        ...


class Student(Generic[Stored]):
    """The quantised model while it is trained.

    Args:
        tensors: of each layer, what is not quantised.
        matrices: of each layer, what is, by name.
        dtype: of products.
        inputs: what becomes of the products' inputs before.

    """

    def __init__(
        self,
        tensors: Sequence[Layer],
        matrices: Sequence[Mapping[str, TrainedMatrix[Stored]]],
        dtype: torch.dtype,
        inputs: Callable[[Tensor], Tensor] = as_they_are,
    ) -> None:
        self._tensors, self._matrices, self._dtype, self._inputs = tensors, matrices, dtype, inputs

    def hidden(self, model: DenseModel, windows: Int[Tensor, "N L"]) -> Float[Tensor, "T H"]:
        """Its hidden states, by the model's parts that are not in its layers."""
        return model.hidden(self._layer, windows, self._inputs)

    def _layer(self, number: int) -> dict[str, Tensor]:
        made = {f"{name}.weight": matrix.weight(self._dtype) for name, matrix in self._matrices[number].items()}
        return {**self._tensors[number], **made}

    def optimizer(self, training: Training) -> torch.optim.Adam:
        """Of all that is trained."""
        found = [one for layer in self._matrices for matrix in layer.values() for one in matrix.parameters(training)]
        groups = [{"params": [tensor for tensor, own in found if own == rate], "lr": rate} for rate in {r for _, r in found}]
        return torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)

    def stored(self) -> list[dict[str, Stored]]:
        """The matrices of each layer as they are now."""
        return [{name: matrix.stored() for name, matrix in layer.items()} for layer in self._matrices]


def trained(
    source: Source,
    student: Student[Stored],
    windows: Int[Tensor, "N L"],
    training: Training,
    device: torch.device,
    show_progress: bool = False,
) -> list[dict[str, Stored]]:
    """Each layer's matrices, trained. The whole model is there, in float32, five times over where its numbers move."""
    dtype = product_dtype(device)
    model = DenseModel(source.config, dict(source.outside_layers()), dtype, device)
    teacher = [layer_of(source, number, dtype, device) for number in range(source.config.num_hidden_layers)]
    with tqdm(total=training.steps, unit=" steps", disable=not show_progress) as bar:

        def tell(step: int, loss: float, held_out: str) -> None:
            bar.update()
            bar.set_postfix_str(f"KL divergence {loss:.4f}{held_out}")

        return distil(model, teacher.__getitem__, student, windows.to(device), training, tell)


def product_dtype(device: torch.device) -> torch.dtype:
    """Bfloat16 where the device computes in it natively, else float32: gradients in float16 would need a scaled loss."""
    return torch.bfloat16 if resolve_dtype("auto", device) == torch.bfloat16 else torch.float32


def is_matrix(name: str) -> bool:
    """Whether a layer's tensor is one of the matrices that are quantised."""
    return name.removesuffix(".weight") in MATRICES


def layer_of(source: Source, number: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """A layer of the model itself: matrices in ``dtype``, the rest in float32."""
    start = f"model.layers.{number}."
    found = {name.removeprefix(start): tensor for name, tensor in source.weights.items() if name.startswith(start)}
    return {name: tensor.to(device, dtype if is_matrix(name) else torch.float32) for name, tensor in found.items()}


def distil(
    model: DenseModel,
    teacher: Callable[[int], Layer],
    student: Student[Stored],
    windows: Int[Tensor, "N L"],
    training: Training,
    tell: Callable[[int, float, str], None] = lambda step, loss, held_out: None,
) -> list[dict[str, Stored]]:
    """Train the student to predict as the teacher does, on ``windows``, some of which are held out.

    Gives each layer's matrices as they were when they predicted those best. ``tell`` hears each step's loss, and in words
    what the looks at the held-out texts found.
    """
    optimizer = student.optimizer(training)
    rates = [group["lr"] for group in optimizer.param_groups]
    length = windows.shape[1]
    windows, held_out = split(windows)
    best: _Best[Stored] = _Best(model, teacher, student, held_out, max(1, training.tokens_at_once // length))
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
    return best.matrices


def split(windows: Int[Tensor, "N L"]) -> tuple[Int[Tensor, "M L"], Int[Tensor, "H L"]]:
    """What is trained on, and what is held out: windows at equal distances, so that there are some of every kind."""
    count = min(int(HELD_OUT_SHARE * len(windows)), HELD_OUT_TOKENS // windows.shape[1])
    held_out = torch.zeros(len(windows), dtype=torch.bool, device=windows.device)
    held_out[[i * len(windows) // count for i in range(count)]] = True
    return windows[~held_out], windows[held_out]


class _Best(Generic[Stored]):
    """The student's matrices as they were when they predicted texts best; without texts, as they were last."""

    def __init__(
        self,
        model: DenseModel,
        teacher: Callable[[int], Layer],
        student: Student[Stored],
        windows: Int[Tensor, "N L"],
        at_once: int,
    ) -> None:
        self._model, self._teacher, self._student = model, teacher, student
        self._windows, self._parts = windows, windows.split(at_once) if len(windows) else ()
        self._last = self._least = math.inf
        self.matrices: list[dict[str, Stored]] = []

    def __str__(self) -> str:
        return f", held out {self._last:.4f}, least {self._least:.4f}" if self._parts else ""

    @torch.no_grad()
    def look(self) -> None:
        """Keep the matrices if none were better."""
        model, tokens = self._model, self._windows.numel()
        pairs = ((model.hidden(self._teacher, part), self._student.hidden(model, part)) for part in self._parts)
        self._last = float(sum(divergence(model.head, *pair, tokens)[0] for pair in pairs))
        if self._last <= self._least:
            self._least = self._last
            self.matrices = self._student.stored()


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
    model: DenseModel, teacher: Callable[[int], Layer], student: Student[Any], windows: Int[Tensor, "N L"], tokens: int
) -> Tensor:
    """Add the gradients of some texts of a batch of so many tokens; gives their part of its loss."""
    with torch.no_grad():
        expected = model.hidden(teacher, windows)
    with torch.enable_grad():
        hidden = student.hidden(model, windows)
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
