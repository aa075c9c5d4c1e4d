"""Checkpoint: a model as it lies on disk (or in a function), and how its weights get into our model."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from refimpl.config import GIB, ModelConfig
from refimpl.errors import CheckpointError, ModelNotFoundError, OutOfMemoryError
from refimpl.loading.dummy import fill_with_random
from refimpl.loading.folder import FolderCheckpoint
from refimpl.loading.gguf import GGUFCheckpoint
from refimpl.loading.hub import hub_checkpoint_folder
from refimpl.loading.left_out import leave_out
from refimpl.loading.progress import LoadingProgress
from refimpl.loading.pull import EMBEDDED_MODEL, embedded_checkpoint_folder
from refimpl.model_shares import share_of
from refimpl.models.llama import LlamaForCausalLM
from refimpl.models.registry import build_model
from refimpl.models.tiny import tiny
from refimpl.quantization.choose import choose_method
from refimpl.quantization.method import Destination, LinearMethod, fill, weight_bytes
from refimpl.quantization.stored import has_its_shape, is_optional, stored_views, wanted_dtype
from refimpl.ranks import ALONE, Ranks
from refimpl.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@runtime_checkable
class Checkpoint(Protocol):
    """What the engine asks of a model: give an object of your own as ``model`` to run weights from anywhere."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def config(self) -> ModelConfig:
        """Its numbers."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor with Hugging Face's name for it, in any float dtype, in any order.

        A tensor may be a view of a mapped file, and is best let go before the next is asked for.
        """

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    def fingerprint(self) -> str:
        """A hash that tells it from other models; benchmarks record it."""


@runtime_checkable
class Outlined(Protocol):
    """What a :class:`Checkpoint` may answer besides, if it knows its tensors before it reads them."""

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """What its ``weights`` will give, by name, shape and dtype: tensors that may be without numbers ("meta")."""


def open_checkpoint(model: Any) -> Checkpoint:
    """The checkpoint that ``EngineArgs.model`` means: "smollm2", "tiny", a folder, a GGUF file, ORG/NAME, or an object.

    Raises:
        ModelNotFoundError: there is no such thing.
        CheckpointError, UnsupportedModelError: it is there, but cannot be run.

    """
    if not isinstance(model, str | Path):
        return _checked_object(model)
    if model == "tiny":
        return tiny()
    if model == EMBEDDED_MODEL:
        return FolderCheckpoint(embedded_checkpoint_folder(), name=EMBEDDED_MODEL)
    path = Path(os.path.expanduser(model))
    if os.path.isfile(path):  # unlike Path.is_file, false for a name that no file can have
        return GGUFCheckpoint(path)
    if os.path.isdir(path) and model != "":
        return FolderCheckpoint(path)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(model)) and path.suffix != ".gguf":
        return FolderCheckpoint(hub_checkpoint_folder(str(model)), name=str(model))
    raise ModelNotFoundError(
        f"no model at {str(model)!r}: it is neither a folder, nor a GGUF file, nor ORG/NAME on the Hub. "
        f"Without --model, refimpl runs its embedded model ({EMBEDDED_MODEL}); --model tiny needs no download"
    )


def _checked_object(model: Any) -> Checkpoint:
    missing = [name for name in ("name", "config", "weights", "tokenizer", "fingerprint") if not hasattr(model, name)]
    if missing:
        wrapped = "; give a transformers model as TransformersCheckpoint(model)" if hasattr(model, "state_dict") else ""
        raise ModelNotFoundError(
            f"model is a {type(model).__name__}; it must be a name, a path, or a checkpoint object "
            f"(this one lacks {', '.join(missing)}){wrapped}"
        )
    checkpoint: Checkpoint = model
    return checkpoint


IGNORED = re.compile(r"\.rotary_emb\.inv_freq$|\.self_attn\.[kv]_scale$|\.[kv]_proj\.output_scale$")
"""Tensors that old checkpoints carry and that are worked out instead; scales of an FP8 cache, which is in 16 bits here."""


def load_model(
    checkpoint: Checkpoint,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    max_model_len: int | None = None,
    method: LinearMethod | None = None,
    ranks: Ranks = ALONE,
) -> LlamaForCausalLM:
    """The model with its weights, or this rank's share of it, in ``dtype`` on ``device``, packed for a CPU.

    Where ``method`` quantises the layers' matrices, each is quantised as it comes: never are two copies of the model there.
    Without one they are held as the checkpoint has them.
    ``max_model_len`` is the longest context that it will see, in tokens (None: the model's own); a rotary embedding whose
    frequencies hang on the context's length is made for that one.

    Raises:
        CheckpointError: tensors are missing, extra, misshapen or of another type; each is named.
        OutOfMemoryError: this machine cannot hold the weights.

    """
    config = checkpoint.config if max_model_len is None else checkpoint.config.for_context(max_model_len)
    method = choose_method(None, device, config, ranks=ranks.size) if method is None else method
    model = _allocate(checkpoint, config, dtype, device, method, ranks)
    leave_out(model, config, dtype, device)
    views = model.checkpoint_views()
    if load_format == "dummy":
        fill_with_random(views, seed)
    else:
        copy_weights(checkpoint.weights(), stored_views(views, config.quantization), checkpoint)
    model.pack_weights()
    return model


def _allocate(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    method: LinearMethod,
    ranks: Ranks,
) -> LlamaForCausalLM:
    try:
        return build_model(config, dtype, device, method, ranks)
    except RuntimeError as error:
        # torch.OutOfMemoryError is a GPU's; on a CPU the allocator's error has no class of its own.
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" not in str(error):
            raise
        needed = weight_bytes(share_of(config, ranks.size), method, dtype.itemsize)
        raise OutOfMemoryError(
            f"{checkpoint.name} needs {needed / GIB:.1f} GiB for its weights, more than this machine can give; use a "
            "smaller model or a 16-bit dtype",
            needed=needed,
        ) from error


def copy_weights(weights: Iterable[tuple[str, Tensor]], views: Mapping[str, Destination], checkpoint: Checkpoint) -> None:
    """Copy each tensor to its view, and see that every view is filled. Mutates the views.

    Where the checkpoint knows its tensors before it reads them (``outlines``), they are held against the views first: what
    does not fit is told within seconds, however large it is.

    Raises:
        CheckpointError: tensors are missing, extra, misshapen or of another type; each is named.

    """
    total = 0
    if isinstance(checkpoint, Outlined):
        fit = Fit(checkpoint, views)
        total = sum(tensor.nbytes for name, tensor in checkpoint.outlines() if fit.place(name, tensor) is not None)
        fit.check()
    fit = Fit(checkpoint, views)
    with LoadingProgress(checkpoint.name, total) as progress:
        for name, tensor in weights:
            view = fit.place(name, tensor)
            if view is not None:
                fill(view, tensor)
                progress.add(tensor.nbytes)
        fit.check()


class Fit:
    """How a checkpoint's tensors fit a model's views: each finds its place, and what does not fit is remembered by name."""

    def __init__(self, checkpoint: Checkpoint, views: Mapping[str, Destination]) -> None:
        self._checkpoint = checkpoint
        self._missing = dict(views)
        self._extra: list[str] = []
        self._misshapen: list[str] = []
        self._mistyped: list[str] = []

    def place(self, name: str, tensor: Tensor) -> Destination | None:
        """Where a tensor goes, if it is wanted and fits. Its numbers are not looked at."""
        view = self._missing.pop(name, None)
        if view is None:
            tied = name == "lm_head.weight" and self._checkpoint.config.tie_word_embeddings
            if not tied and not IGNORED.search(name):
                self._extra.append(name)
        elif not has_its_shape(view, tensor):
            self._misshapen.append(f"{name} is {list(tensor.shape)}, its configuration makes it {list(view.shape)}")
        elif wanted := wanted_dtype(view, tensor):
            self._mistyped.append(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not {wanted}")
        else:
            return view
        return None

    def check(self) -> None:
        """See that all tensors came, and that each had a place.

        Raises:
            CheckpointError: some did not.

        """
        problems = [
            f"{what}: {_some(names)}"
            for what, names in (
                ("missing", [name for name, view in self._missing.items() if not is_optional(view)]),
                ("not in this architecture", self._extra),
                ("misshapen", self._misshapen),
                ("of another type", self._mistyped),
            )
            if names
        ]
        if problems:
            raise CheckpointError(
                f"the tensors of {self._checkpoint.name} do not fit its configuration — {'; '.join(problems)}. Download it "
                "again, or give a model that refimpl runs"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
