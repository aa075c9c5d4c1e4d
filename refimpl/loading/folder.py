"""A checkpoint folder in Hugging Face's layout: config.json, safetensors (one file, or shards with an index), tokenizer."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from refimpl.config import ModelConfig
from refimpl.errors import CheckpointError
from refimpl.loading.hf_config import read_config
from refimpl.tokenizer.tokenizer import Tokenizer, stand_in_tokenizer

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
AGAIN = "download the checkpoint again"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class FolderCheckpoint:
    """A folder as ``save_pretrained`` writes it. Only safetensors are read: a pickle can run code."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.folder = folder
        self.name = name or folder.resolve().name

    @functools.cached_property
    def config(self) -> ModelConfig:
        """From config.json and generation_config.json."""
        return read_config(self.folder)

    def files(self) -> list[Path]:
        """The safetensors files, in order.

        Raises:
            CheckpointError: there are none, or the index names one that is missing.

        """
        names = self._names()
        for name in names:
            if not (self.folder / name).is_file():
                raise CheckpointError(self._no_weights(name))
        return [self.folder / name for name in names]

    def _names(self) -> list[str]:
        return sorted(set(self._index().values())) if self._sharded() else [SINGLE]

    def _sharded(self) -> bool:
        """One file counts before an index, as in transformers."""
        return not (self.folder / SINGLE).exists() and (self.folder / INDEX).exists()

    def _index(self) -> dict[str, str]:
        """Which file holds which tensor."""
        index = self.folder / INDEX
        try:
            where: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            outside = any(Path(name).name != name for name in where.values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{index} cannot be read ({error!r}); download it again") from error
        if outside:
            raise CheckpointError(f"{index} names files outside its folder; download it again from where you trust it")
        return where

    def _no_weights(self, name: str) -> str:
        if any(self.folder.glob("*.bin")):
            return (
                f"{self.folder} has its weights in .bin files; refimpl reads safetensors only, since a pickle can run code. "
                "Convert it with transformers: save_pretrained(…, safe_serialization=True)"
            )
        pickled = " (original/ and .pth files cannot be read)" if any(self.folder.rglob("*.pth")) else ""
        return (
            f"{self.folder} has no {name}; download the checkpoint again{pickled}, or use load_format=dummy for random "
            "weights"
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, mapped from the file and copied when it is used.

        Raises:
            CheckpointError: a file is damaged, two hold one tensor, or one lacks a tensor that the index puts there.

        """
        from safetensors import SafetensorError, safe_open

        found: dict[str, str] = {}
        for path in self.files():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - a safe_open is no dict
                        if name in found:
                            raise CheckpointError(f"{name} is in {found[name]} and again in {path.name}; {AGAIN}")
                        found[name] = path.name
                        yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is damaged or no safetensors file ({error}); download it again") from error
        if self._sharded():
            for name, file_name in self._index().items():
                if found.get(name) != file_name:
                    raise CheckpointError(
                        f"{self.folder / INDEX} names {name} in {file_name}, which does not hold it; {AGAIN}"
                    )

    def tokenizer(self) -> Tokenizer:
        """Read through transformers.

        A folder with neither tokenizer nor weights can only run with random weights (``load_format="dummy"``): its text is
        then bytes, or letters where the vocabulary is too small for them.

        Raises:
            CheckpointError: the folder has weights but no tokenizer, or one that cannot be read.

        """
        if not self._has_weights() and not any((self.folder / name).exists() for name in TOKENIZER_FILES):
            log.info("%s has no tokenizer: its texts are bytes or letters", self.folder)
            return stand_in_tokenizer(self.config.vocab_size)
        return Tokenizer.from_pretrained(self.folder)

    def _has_weights(self) -> bool:
        return any((self.folder / name).exists() for name in (SINGLE, INDEX))

    def fingerprint(self) -> str:
        """blake2b over the names and sizes of the files and the first MiB of each; without weights, config.json's alone."""
        digest = hashlib.blake2b(digest_size=16)
        for path in [self.folder / "config.json", *(self.files() if self._has_weights() else [])]:
            with path.open("rb") as file:
                digest.update(f"{path.name} {path.stat().st_size}".encode() + file.read(2**20))
        return digest.hexdigest()
