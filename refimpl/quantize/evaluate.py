"""What a model lost: its perplexity on a text, and how far its distributions lie from those of the model it was made of.

Perplexity is ``exp(−mean log p(token | tokens before it))`` over windows of the text. The KL divergence of the next token's
distribution, ``Σ p log(p / q)`` with p the reference's, sees a change that the text's own tokens do not: its mean over all
positions, and the 99th percentile, which tells of the worst.
"""

from __future__ import annotations

import gzip
import hashlib
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from refimpl.bench.show import Table, table
from refimpl.cache.kv_cache import LayerKV
from refimpl.errors import ConfigError
from refimpl.executor.device import resolve_device, resolve_dtype
from refimpl.loading.checkpoint import Checkpoint, load_model, open_checkpoint
from refimpl.models.llama import LlamaForCausalLM
from refimpl.quantize.dense_layers import DenseModel
from refimpl.quantize.distil import layer_of
from refimpl.quantize.source import Source
from refimpl.quantize.trained_fp8 import rounded_rows
from refimpl.speculate.dense import DenseStep

TEXT = "alice.txt.gz"
"""Among the workloads: "Alice's Adventures in Wonderland" (Lewis Carroll, 1865), which is in the public domain."""
WINDOW = 1024
TOKENS_AT_ONCE = 4096
LOGITS_AT_ONCE = 2**25
"""Values of logits of one model that are there at one time, in float32: 128 MiB."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A model beside a reference, on one text."""

    model: str
    against: str
    text: str
    text_hash: str
    tokens: int
    """That were predicted."""
    window: int
    """Tokens of which each begins anew."""
    perplexity: float
    reference_perplexity: float
    kl_mean: float
    """In nats."""
    kl_p99: float
    same_top_token: float
    """The share of positions where both find the same token the most probable."""

    @property
    def increase(self) -> float:
        """How much larger the perplexity is than the reference's, as a share of it."""
        return self.perplexity / self.reference_perplexity - 1


HEAD = ("perplexity", "increase", "KL divergence, mean", "99th percentile", "same top token")


def evaluation_table(found: Sequence[Evaluation]) -> Table:
    """Models beside one reference, for people. KL divergences are in nats."""
    first = found[0]
    rows: list[tuple[str, ...]] = [(first.against, f"{first.reference_perplexity:.4f}", "", "", "", "")]
    for one in found:
        figures = (one.perplexity, one.increase, one.kl_mean, one.kl_p99, one.same_top_token)
        shown = ("{:.4f}", "{:+.2%}", "{:.5f}", "{:.4f}", "{:.2%}")
        rows.append((one.model, *(form.format(figure) for form, figure in zip(shown, figures, strict=True))))
    return table((f"{first.tokens:,} tokens of {first.text}", *HEAD), rows)


def evaluate(
    models: Sequence[Any],
    against: Any,
    *,
    text: Path | None = None,
    tokens: int | None = None,
    window: int = WINDOW,
    device: str = "auto",
    dtype: str = "float32",
    show_progress: bool = False,
) -> list[Evaluation]:
    """Compare models with a reference of the same tokenizer. All of them are in memory at the same time.

    Args:
        models: each as ``EngineArgs.model``.
        against: the reference, given likewise.
        text: a file to predict, in UTF-8; None: the one that comes with refimpl.
        tokens: take so many from its beginning; None: all.
        window: the text is cut into pieces of so many tokens, each predicted on its own.
        device: where it is computed.
        dtype: of activations, and of weights that are not quantised.
        show_progress: draw a bar on stderr.

    Raises:
        ConfigError: they have different tokenizers, or the text is too short or cannot be read.

    """
    checkpoints = [open_checkpoint(model) for model in (*models, against)]
    name, content = _read(text)
    windows = _windows(checkpoints, content, tokens, window)
    place = resolve_device(device)
    with torch.inference_mode():
        predictors = [_Predictor(checkpoint, place, resolve_dtype(dtype, place)) for checkpoint in checkpoints]
        found = _compare(predictors, windows, place, show_progress)
    return _evaluations([checkpoint.name for checkpoint in checkpoints], name, content, windows, found)


def evaluate_rounded_inputs(
    against: Any,
    *,
    text: Path | None = None,
    tokens: int | None = None,
    window: int = WINDOW,
    device: str = "auto",
    dtype: str = "float32",
    show_progress: bool = False,
) -> Evaluation:
    """What FP8 costs by its activations alone: the model with the weights that it has, but inputs of products in e4m3.

    No choice of the weights' numbers undoes that: it is the least that FP8 costs. Arguments and errors are those of
    :func:`evaluate`.
    """
    checkpoint = open_checkpoint(against)
    name, content = _read(text)
    windows = _windows([checkpoint], content, tokens, window)
    place = resolve_device(device)
    with torch.inference_mode():
        kind = resolve_dtype(dtype, place)
        predictors = (_RoundedInputs(checkpoint, place, kind), _Predictor(checkpoint, place, kind))
        found = _compare(predictors, windows, place, show_progress)
    [evaluation] = _evaluations([f"{checkpoint.name}, activations in FP8", checkpoint.name], name, content, windows, found)
    return evaluation


def _evaluations(
    names: Sequence[str],
    text: str,
    content: str,
    windows: Sequence[Int[Tensor, "L"]],
    found: tuple[Float[Tensor, "T"], Sequence[Figures]],
) -> list[Evaluation]:
    """The figures of the models, whose names come before the reference's."""
    reference_losses, each = found
    text_hash = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    return [
        Evaluation(
            model=name, against=names[-1], text=text, text_hash=text_hash,
            tokens=len(reference_losses), window=len(windows[0]), perplexity=math.exp(losses.mean()),
            reference_perplexity=math.exp(reference_losses.mean()), kl_mean=float(divergences.mean()),
            kl_p99=float(divergences.quantile(0.99)), same_top_token=float(same.mean()),
        )
        for name, (losses, divergences, same) in zip(names, each, strict=False)
    ]  # fmt: skip


def _read(text: Path | None) -> tuple[str, str]:
    """The text's name, and the text."""
    if text is None:
        packed = files("refimpl").joinpath(f"bench/workloads/{TEXT}").read_bytes()
        return "Alice's Adventures in Wonderland", gzip.decompress(packed).decode("utf-8")
    try:
        return text.name, text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the text cannot be read: {error}; give a file in UTF-8") from error


def _windows(checkpoints: Sequence[Checkpoint], content: str, tokens: int | None, window: int) -> list[Int[Tensor, "L"]]:
    """The text's tokens in pieces; the last one is shorter."""
    reference = checkpoints[-1]
    ids = reference.tokenizer().encode(content)
    for checkpoint in checkpoints[:-1]:
        if checkpoint.config.vocab_size != reference.config.vocab_size or checkpoint.tokenizer().encode(content) != ids:
            raise ConfigError(
                f"{checkpoint.name} and {reference.name} have different tokenizers, so their distributions cannot be "
                "compared; give the checkpoint that the model was made of"
            )
    if tokens is not None and tokens < 0:
        raise ConfigError(f"tokens is {tokens}; the text must have at least 2")
    ids = ids[:tokens]
    longest = min(checkpoint.config.max_position_embeddings for checkpoint in checkpoints)
    if not 2 <= window <= longest:
        raise ConfigError(f"window is {window}; it must be from 2 to {longest}, the longest context of these models")
    pieces = [piece for piece in torch.tensor(ids, dtype=torch.int64).split(window) if len(piece) > 1]
    if not pieces:
        raise ConfigError(f"the text has {len(ids)} tokens; it must have at least 2")
    return pieces


class _Predictor:
    """A model over windows of text, without a cache."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.model: LlamaForCausalLM = load_model(checkpoint, "auto", dtype, device, 0)
        self._device = device

    def hidden(self, windows: Int[Tensor, "N L"]) -> Float[Tensor, "T H"]:
        """Hidden states of all tokens, one after the other."""
        count, length = windows.shape
        dtype = self.model.embed_tokens.dtype
        stand_ins = [LayerKV(*[torch.empty(0, dtype=dtype, device=self._device)] * 2) for _ in self.model.layers]
        positions = torch.arange(length, device=self._device).repeat(count)
        step = DenseStep(stand_ins, count, ())
        hidden: Tensor = self.model(windows.flatten().to(self._device), positions, stand_ins, step)
        return hidden

    def log_probabilities(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R V"]:
        """Of the next token, behind some of them."""
        return self.model.compute_logits(hidden).log_softmax(-1)


class _RoundedInputs:
    """The model with its own weights, where inputs of products are rounded to e4m3 a token at a time."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        source = Source(checkpoint)
        self._model = DenseModel(source.config, dict(source.outside_layers()), dtype, device)
        self._layers = [layer_of(source, number, dtype, device) for number in range(source.config.num_hidden_layers)]
        self._device = device

    def hidden(self, windows: Int[Tensor, "N L"]) -> Float[Tensor, "T H"]:
        """Hidden states of all tokens, one after the other."""
        return self._model.hidden(self._layers.__getitem__, windows.to(self._device), rounded_rows)

    def log_probabilities(self, hidden: Float[Tensor, "R H"]) -> Float[Tensor, "R V"]:
        """Of the next token, behind some of them."""
        return (hidden.to(self._model.head.dtype) @ self._model.head.T).float().log_softmax(-1)


Figures = tuple[Float[Tensor, "T"], Float[Tensor, "T"], Float[Tensor, "T"]]
"""At each position: a model's loss, its KL divergence, and 1 where its most probable token is the reference's."""


def _compare(
    predictors: Sequence[_Predictor | _RoundedInputs],
    windows: list[Int[Tensor, "L"]],
    device: torch.device,
    show_progress: bool,
) -> tuple[Float[Tensor, "T"], list[Figures]]:
    """The losses of the last predictor, which is the reference, and the figures of the others."""
    *others, reference = predictors
    assert isinstance(reference, _Predictor)
    rows_at_once = max(1, LOGITS_AT_ONCE // reference.model.config.vocab_size)
    reference_losses: list[Tensor] = []
    found: list[list[Figures]] = [[] for _ in others]
    with tqdm(total=sum(map(len, windows)), unit=" tokens", disable=not show_progress) as bar:
        for batch in _batches(windows):
            expected, *states = [predictor.hidden(batch) for predictor in (reference, *others)]
            for rows, targets in _predicted(batch, device, rows_at_once):
                p = reference.log_probabilities(expected[rows])
                reference_losses.append(_losses(p, targets))
                for predictor, state, figures in zip(others, states, found, strict=True):
                    figures.append(_figures(predictor.log_probabilities(state[rows]), p, targets))
            bar.update(batch.numel())
    joined = [tuple(torch.cat(parts) for parts in zip(*figures, strict=True)) for figures in found]
    return torch.cat(reference_losses), [(losses, divergences, same) for losses, divergences, same in joined]


def _batches(windows: list[Int[Tensor, "L"]]) -> Iterator[Int[Tensor, "N L"]]:
    """Windows of one length together, as many as are computed at once."""
    whole = [window for window in windows if len(window) == len(windows[0])]
    at_once = max(1, TOKENS_AT_ONCE // len(windows[0]))
    for start in range(0, len(whole), at_once):
        yield torch.stack(whole[start : start + at_once])
    yield from (window.unsqueeze(0) for window in windows[len(whole) :])


def _predicted(
    batch: Int[Tensor, "N L"], device: torch.device, at_once: int
) -> Iterator[tuple[Int[Tensor, "R"], Int[Tensor, "R"]]]:
    """The rows of a batch that have a token after them in their window, and those tokens; a slice at a time."""
    count, length = batch.shape
    rows = torch.arange(count * length).view(count, length)[:, :-1].flatten().to(device)
    targets = batch[:, 1:].flatten().to(device)
    yield from zip(rows.split(at_once), targets.split(at_once), strict=True)


def _losses(log_probabilities: Float[Tensor, "R V"], targets: Int[Tensor, "R"]) -> Float[Tensor, "R"]:
    return -log_probabilities.gather(1, targets.unsqueeze(1)).squeeze(1).double().cpu()


def _figures(q: Float[Tensor, "R V"], p: Float[Tensor, "R V"], targets: Int[Tensor, "R"]) -> Figures:
    divergences = (p.exp() * (p - q)).sum(-1)
    same = q.argmax(-1) == p.argmax(-1)
    return _losses(q, targets), divergences.double().cpu(), same.double().cpu()
