"""The checkpoint that is quantised: its tensors by name, and what goes beside them into the new folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refimpl.config import ModelConfig
from refimpl.errors import CheckpointError, UnsupportedModelError
from refimpl.loading.checkpoint import IGNORED, Checkpoint, open_checkpoint
from refimpl.loading.folder import FolderCheckpoint
from refimpl.loading.hf_config import write_config
from refimpl.models.registry import build_model
from refimpl.quantize.groups import matrix_names

BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
"""What a checkpoint folder holds beside its weights, as far as it is read again: tokenizer, chat template, licence."""
NOT_COPIED = ("config.json", "*.index.json", "*.safetensors")


class Source:
    """A model that can be quantised. Of a folder, tensors are mapped from its files and read when they are used.

    Args:
        model: as ``EngineArgs.model``: a folder, a GGUF file (whose weights are dequantised first), a name, an object.

    Raises:
        UnsupportedModelError: it is quantised already.
        CheckpointError: tensors are missing or extra.

    """

    def __init__(self, model: Any) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(model)
        self.config: ModelConfig = self.checkpoint.config
        if self.config.quantization is not None:
            raise UnsupportedModelError(
                f"{self.checkpoint.name} is quantised already ({self.config.quantization.title}); give the checkpoint that "
                "it was made of"
            )
        self._raw = self._raw_config()
        self.weights: Mapping[str, Tensor] = self._named()

    def _raw_config(self) -> dict[str, Any]:
        """config.json of a folder; empty for what has none."""
        if not isinstance(self.checkpoint, FolderCheckpoint):
            return {}
        raw: dict[str, Any] = json.loads((self.checkpoint.folder / "config.json").read_text(encoding="utf-8"))
        return raw

    def _named(self) -> dict[str, Tensor]:
        tied = self.config.tie_word_embeddings
        found = {
            name: tensor
            for name, tensor in self.checkpoint.weights()
            if not IGNORED.search(name) and not (tied and name == "lm_head.weight")
        }
        expected = self._expected()
        for problem, names in (
            ("lacks", expected - found.keys()),
            ("has, beyond its architecture,", found.keys() - expected),
        ):
            if names:
                some = ", ".join(sorted(names)[:3]) + (" and more" if len(names) > 3 else "")
                raise CheckpointError(f"{self.checkpoint.name} {problem} {some}; download it again, or give another model")
        return found

    def _expected(self) -> set[str]:
        """The names of all tensors: those of a model of one layer, for every layer."""
        one_layer = dataclasses.replace(self.config, num_hidden_layers=1, windows=self.config.windows[:1])
        names = build_model(one_layer, torch.float32, torch.device("meta")).checkpoint_views()
        layers = range(self.config.num_hidden_layers)
        return {name.replace("model.layers.0.", f"model.layers.{i}.", 1) for name in names for i in layers}

    def matrices(self) -> list[str]:
        """Names, without ``.weight``, of everything that is quantised: the matrices of the layers."""
        return [name for layer in range(self.config.num_hidden_layers) for name in matrix_names(layer)]

    def outside_layers(self) -> Iterator[tuple[str, Tensor]]:
        """What is in no layer: embeddings, the last norm, the output head."""
        return ((name, tensor) for name, tensor in self.weights.items() if not name.startswith("model.layers."))

    @property
    def kept(self) -> torch.dtype:
        """The 16-bit type of what is not quantised: bfloat16 where the source has it, else float16."""
        return torch.bfloat16 if self.weights["model.norm.weight"].dtype == torch.bfloat16 else torch.float16

    def narrowed(self, tensor: Tensor, name: str) -> Tensor:
        """A tensor in :attr:`kept`.

        Raises:
            UnsupportedModelError: it has values beyond the type's range.

        """
        narrow = tensor.to(self.kept)
        if not narrow.isfinite().all():
            raise UnsupportedModelError(
                f"{name} of {self.checkpoint.name} has values beyond {torch.finfo(self.kept).max:g}, the largest of "
                f"{self.kept}; convert the checkpoint to bfloat16 first"
            )
        return narrow

    def write_beside(self, folder: Path, quantization: Mapping[str, Any]) -> None:
        """Write config.json with ``quantization`` in it, and copy or make generation settings and tokenizer."""
        if isinstance(self.checkpoint, FolderCheckpoint):
            _copy_beside(self.checkpoint.folder, folder)
        else:
            write_config(self.config, folder)
            self.checkpoint.tokenizer().save(folder)
        raw = self._raw or json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = {"dtype" if "dtype" in raw else "torch_dtype": str(self.kept).removeprefix("torch.")}
        written = raw | kind | {"quantization_config": dict(quantization)}
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _copy_beside(source: Path, folder: Path) -> None:
    for pattern in BESIDE:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not any(path.match(left_out) for left_out in NOT_COPIED):
                shutil.copyfile(path, folder / path.name)
