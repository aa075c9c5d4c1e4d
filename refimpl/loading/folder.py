"""A checkpoint folder in Hugging Face's layout: config.json, safetensors (one file, or shards with an index), tokenizer."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refimpl.config import ModelConfig
from refimpl.errors import CheckpointError
from refimpl.loading.hf_config import read_config
from refimpl.tokenizer.tokenizer import Tokenizer, stand_in_tokenizer

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
AGAIN = "download the checkpoint again"
MAPPED_BYTES = 256 * 2**20
"""What is handed out of one mapping of a file."""
MOST_HEADER_BYTES = 100_000_000
"""Of an index, as of a safetensors file's header, where the library keeps to it: a damaged one is not read for hours."""
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
            if index.stat().st_size > MOST_HEADER_BYTES:
                raise ValueError(f"it has {index.stat().st_size:,} bytes, and {MOST_HEADER_BYTES:,} are the most")
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

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor's name, shape and dtype by the files' headers, as tensors without numbers (on the device "meta").

        Raises:
            CheckpointError: as for :meth:`weights`.

        """
        for path, names in self._contents().items():
            with _opened(path) as file:
                for name in names:
                    yield name, torch.empty_like(file.get_tensor(name), device="meta")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, as a view of its mapped file: what is not sliced off, copied or computed with is not read.

        A file is mapped anew for each :data:`MAPPED_BYTES` of it, so that pages that were read do not count to this process
        for longer than somebody holds tensors of theirs.

        Raises:
            CheckpointError: a file is damaged, two hold one tensor, or one lacks a tensor that the index puts there.
                Nothing has been read by then but the headers.

        """
        for path, names in self._contents().items():
            waiting = list(reversed(names))
            while waiting:
                handed_out = 0
                with _opened(path) as file:
                    while waiting and handed_out < MAPPED_BYTES:
                        name = waiting.pop()
                        tensor = file.get_tensor(name)
                        handed_out += tensor.nbytes
                        yield name, tensor
                        del tensor

    def _contents(self) -> dict[Path, list[str]]:
        """The names that each file holds, in the order of their numbers there."""
        found: dict[str, str] = {}
        contents: dict[Path, list[str]] = {}
        for path in self.files():
            with _opened(path) as file:
                contents[path] = list(file.offset_keys())
            for name in contents[path]:
                if name in found:
                    raise CheckpointError(f"{name} is in {found[name]} and again in {path.name}; {AGAIN}")
                found[name] = path.name
        if self._sharded():
            for name, file_name in self._index().items():
                if found.get(name) != file_name:
                    held = f", but {found[name]} does" if name in found else ""
                    raise CheckpointError(
                        f"{self.folder / INDEX} names {name} in {file_name}, which does not hold it{held}; {AGAIN}"
                    )
        return contents

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


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, mapped. Its header is held against the file's size, so that one that is cut short is told here."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file ({error}); download it again") from error
