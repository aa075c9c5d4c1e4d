"""Where refimpl keeps what it makes once: models, and operations compiled for a CPU."""

from __future__ import annotations

import os
from pathlib import Path

from refimpl.errors import ConfigError


def cache_folder() -> Path:
    """``$REFIMPL_CACHE``, else ``refimpl`` in the user's cache folder. It may not be there yet.

    Raises:
        ConfigError: the user has no home folder, as in a container that runs under a number of its own.

    """
    own, caches = os.environ.get("REFIMPL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own).expanduser() if own else Path(caches or "~/.cache").expanduser() / "refimpl"
    except RuntimeError as error:
        raise ConfigError("this user has no home folder to keep models in; set REFIMPL_CACHE to a folder") from error
