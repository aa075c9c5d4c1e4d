"""The checkpoint that is quantised: its tensors by name, and what goes beside them into the new folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refimpl.config import ModelConfig
from refimpl.errors import CheckpointError, UnsupportedModelError
from refimpl.loading.checkpoint import IGNORED, Checkpoint, open_checkpoint
from refimpl.loading.folder import FolderCheckpoint
from refimpl.loading.hf_config import write_config
from refimpl.quantize.groups import MATRICES, NORMS, matrix_names

BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
"""What a checkpoint folder holds beside its weights, as far as it is read again: tokenizer, chat template, licence."""
NOT_COPIED = ("config.json", "*.index.json", "*.safetensors")


class Source:
    """A model that can be quantised. Of a folder, tensors are mapped from its files and read when they are used.

    Args:
        model: as ``EngineArgs.model``: a folder, a GGUF file (whose weights are dequantised first), a name, an object.

    Raises:
        UnsupportedModelError: it is quantised already, or its layers are of another shape than Llama's.
        CheckpointError: tensors are missing.

    """

    def __init__(self, model: Any) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(model)
        self._raw = self._raw_config()
        if found := self._raw.get("quantization_config"):
            method = found.get("quant_method", "unknown") if isinstance(found, dict) else found
            raise UnsupportedModelError(
                f"{self.checkpoint.name} is quantised already ({method}); give the checkpoint that it was made of"
            )
        self.config: ModelConfig = self.checkpoint.config
        self.weights: Mapping[str, Tensor] = self._named()

    def _raw_config(self) -> dict[str, Any]:
        """config.json of a folder; empty for what has none."""
        if not isinstance(self.checkpoint, FolderCheckpoint):
            return {}
        try:
            raw = json.loads((self.checkpoint.folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}  # reading its configuration says what is wrong
        return raw if isinstance(raw, dict) else {}

    def _named(self) -> dict[str, Tensor]:
        tied = self.config.tie_word_embeddings
        found = {
            name: tensor
            for name, tensor in self.checkpoint.weights()
            if not IGNORED.search(name) and not (tied and name == "lm_head.weight")
        }
        layers = range(self.config.num_hidden_layers)
        of_layers = {f"model.layers.{i}.{part}.weight" for i in layers for part in (*MATRICES, *NORMS)}
        outside = {"model.embed_tokens.weight", "model.norm.weight"} | (set() if tied else {"lm_head.weight"})
        expected = of_layers | outside
        if missing := sorted(expected - found.keys()):
            raise CheckpointError(
                f"{self.checkpoint.name} lacks {', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}; download "
                "it again, or give a model of Llama's shape"
            )
        self._refuse_strangers(found.keys() - expected)
        return found

    def _refuse_strangers(self, names: Iterable[str]) -> None:
        """Biases are kept as they are; any other tensor of a layer means that it computes something else."""
        strange = sorted(name for name in names if not name.endswith(".bias"))
        if strange:
            raise UnsupportedModelError(
                f"{self.checkpoint.name} has {', '.join(strange[:3])}, which no Llama has: quantising it is not implemented"
            )

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
