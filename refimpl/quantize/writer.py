"""Writing a checkpoint folder: in shards, with an index, under another name until it is whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from refimpl.errors import ConfigError, RefimplError
from refimpl.loading.folder import INDEX, SINGLE

SHARD_BYTES = 5 * 10**9


def check_out(out: Path, overwrite: bool) -> None:
    """See, before hours of work, that the folder may be written.

    Raises:
        ConfigError: something is there already, or nothing can be written beside it.

    """
    try:
        if not overwrite and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
            raise ConfigError(f"{out} exists already; give another folder, or overwrite it with --overwrite")
        if overwrite and out.exists() and not (out / "config.json").is_file() and any(out.iterdir()):
            raise ConfigError(f"{out} is no checkpoint folder, so it is not overwritten; give another one")
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-").cleanup()
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error}); give another folder") from error


@contextmanager
def new_folder(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill. It becomes ``out`` by one rename at the end; whatever fails or interrupts, ``out`` stays as it was.

    Raises:
        ConfigError: see :func:`check_out`; or the disk is full.

    """
    check_out(out, overwrite)
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as work:
            made = Path(work) / out.name
            made.mkdir()
            yield made
            if out.exists():  # empty, or to be overwritten; it goes when the work folder goes
                os.replace(out, Path(work) / "old")
            os.replace(made, out)
    except RefimplError:
        raise  # some of them are OSErrors too
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error}); give another folder, or make room") from error


class ShardWriter:
    """Collects tensors and writes a file whenever they are many.

    Args:
        folder: where the files go.
        shard_bytes: the most that one file holds, unless one tensor alone is larger.

    Raises:
        ConfigError: that is less than a byte.

    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        if shard_bytes < 1:
            raise ConfigError(f"a safetensors file must hold at least 1 byte, not {shard_bytes}; 5 · 10⁹ is usual")
        self._folder, self._shard_bytes = folder, shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take over a tensor; it must not be changed afterwards."""
        if self._waiting and self._waiting_bytes() + tensor.nbytes > self._shard_bytes:
            self._write()
        self._waiting[name] = tensor.contiguous()
        self._total += tensor.nbytes

    def _waiting_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._waiting.values())

    def _write(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file(self._waiting, self._folder / f"part-{len(self._shards)}", metadata={"format": "pt"})
        except SafetensorError as error:  # how it says that the disk is full
            raise OSError(str(error)) from error
        self._shards.append(list(self._waiting))
        self._waiting = {}

    def finish(self) -> None:
        """Write what is left, give the files their names, and write an index if there are several."""
        self._write()
        count = len(self._shards)
        index: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = SINGLE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
            (self._folder / f"part-{number}").rename(self._folder / file)
            index |= dict.fromkeys(names, file)
        if count > 1:
            text = json.dumps({"metadata": {"total_size": self._total}, "weight_map": index}, indent=2)
            (self._folder / INDEX).write_text(text + "\n", encoding="utf-8")
