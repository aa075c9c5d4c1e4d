"""Checkpoints from the Hugging Face Hub: from its cache here, or downloaded; and what to do where they cannot be had."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from refimpl.errors import CheckpointError, ModelError, ModelNotFoundError
from refimpl.loading.folder import FolderCheckpoint
from refimpl.loading.pull import say

WANTED_FROM_HUB = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
UNWANTED_FROM_HUB = ["original/*", "consolidated*"]
"""The same weights once more, in their makers' own layouts."""
KEPT_FREE = 2**30
"""Bytes of a disk that a download leaves: a full one is trouble for everybody."""
INSTEAD = "or give --model a local folder or GGUF file"


def hub_checkpoint_folder(name: str) -> Path:
    """The local folder of ORG/NAME: from the Hub's cache, or downloaded first with progress bars on stderr.

    Raises:
        ModelNotFoundError: the Hub cannot be reached, or has no such model for you; the message says what to do about it.
        ModelError: it does not fit the disk.

    """
    from huggingface_hub import snapshot_download

    if (cached := hub_folder_if_cached(name)) is not None:
        return cached
    say(f"downloading {name} from the Hub …")
    try:
        listed = snapshot_download(name, allow_patterns=WANTED_FROM_HUB, ignore_patterns=UNWANTED_FROM_HUB, dry_run=True)
        _check_room(name, sum(file.file_size or 0 for file in listed if file.will_download))
        return Path(snapshot_download(name, allow_patterns=WANTED_FROM_HUB, ignore_patterns=UNWANTED_FROM_HUB))
    except ModelError:
        raise
    except Exception as error:  # the Hub's own errors, those of its HTTP client, those of the disk
        raise _told(name, error) from error


def hub_folder_if_cached(name: str) -> Path | None:
    """The folder of ORG/NAME in the Hub's cache, if all of its weights are there. No network is used."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        patterns = {"allow_patterns": WANTED_FROM_HUB, "ignore_patterns": UNWANTED_FROM_HUB}
        folder = Path(snapshot_download(name, **patterns, local_files_only=True))
        FolderCheckpoint(folder).files()
        return folder
    except (LocalEntryNotFoundError, HFValidationError, CheckpointError):
        return None  # nothing there, or only a part: another program fetched just the configuration, or a download broke off


def hub_cache() -> Path:
    """Where the Hub's own programs keep models."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _check_room(name: str, needed: int) -> None:
    """See that a download fits the disk before it begins.

    Raises:
        ModelError: it does not.

    """
    cache = hub_cache()
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if needed > free - KEPT_FREE:
        raise ModelError(
            f"{name} takes {needed / 1e9:.1f} GB more on the disk, and {cache} has {free / 1e9:.1f} GB free, of which "
            f"{KEPT_FREE / 1e9:.1f} are kept: make room, set HF_HOME to a folder on another disk, {INSTEAD}",
            needed=needed,
            free=free,
        )


def _told(name: str, error: Exception) -> ModelError:
    """What went wrong, for people, and what to do."""
    causes = list(_causes(error))
    if any(isinstance(cause, OSError) and cause.errno == errno.ENOSPC for cause in causes):
        return ModelError(
            f"the disk of {hub_cache()} became full while {name} was downloaded: make room (what is there already is kept "
            f"for the next try), set HF_HOME to a folder on another disk, {INSTEAD}"
        )
    reason = (str(causes[-1]).strip().splitlines() or [""])[0]
    said = f"{type(causes[-1]).__name__}: {reason}" if reason else type(causes[-1]).__name__
    return ModelNotFoundError(f"{name} cannot be had from the Hub ({said}). {_advice(name, causes)}, {INSTEAD}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what caused it, and so on to the root. The Hub wraps what the network said."""
    while error is not None:
        yield error
        error = error.__cause__


def _advice(name: str, causes: list[BaseException]) -> str:
    from huggingface_hub import errors

    def among(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    status = next((cause.response.status_code for cause in causes if isinstance(cause, errors.HfHubHTTPError)), 0)
    if among(errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it, or copy the model into the Hub's cache with `hf download` elsewhere"
    if among(errors.GatedRepoError):
        return (
            f"It is gated: accept its licence at https://huggingface.co/{name}, and when that is granted log in as the same "
            "user with `hf auth login`, or set HF_TOKEN"
        )
    if among(errors.RevisionNotFoundError):
        return f"It has no branch main: fetch one of https://huggingface.co/{name}/tree with `hf download --local-dir`"
    if among(errors.DisabledRepoError):
        return "The Hub has switched it off"
    if among(errors.RepositoryNotFoundError):
        return "There is no such model, or it is private: check the name, and log in with `hf auth login` or set HF_TOKEN"
    if among(errors.HFValidationError):
        return "Check the name"
    if status in (401, 403):
        return "The Hub refuses your token: log in anew with `hf auth login`, or set HF_TOKEN to one that may read the model"
    if status == 429:
        return "The Hub was asked too often from here: wait a while, or log in with `hf auth login`"
    if status >= 500:
        return "The Hub has trouble of its own: try again later"
    return "Check the name and the network, log in with `hf auth login` if it is gated"
