"""Parts of one engine: an object that is given as an option keeps books of that engine's requests or blocks."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from refimpl.errors import ConfigError

if TYPE_CHECKING:
    from refimpl.engine import Engine

OWNER = "_refimpl_engine"
"""The attribute of a part that says which engine it serves."""


def claim(engine: Engine, **parts: Any) -> None:
    """Say that these parts, by the names of their options, serve this engine. Names and classes serve any number.

    Raises:
        ConfigError: an object serves another engine that is open; after that one is closed, it may serve a new one.

    """
    objects = {option: part for option, part in parts.items() if not isinstance(part, str | type)}
    for option, part in objects.items():
        owner = getattr(part, OWNER, lambda: None)()
        if owner is not None and owner.is_open:
            raise ConfigError(
                f"{option} is an object that serves another engine, and would mix up the two; give each engine one of its "
                f"own, or the class {type(part).__name__}, or close the other engine first"
            )
    for part in objects.values():
        with contextlib.suppress(AttributeError):  # an object with __slots__ cannot say
            setattr(part, OWNER, weakref.ref(engine))
