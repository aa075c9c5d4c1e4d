"""Which of the server's keys a client gave."""

from __future__ import annotations

import hmac
from collections.abc import Iterable


def given_key(authorization: str, keys: Iterable[str]) -> str | None:
    """The key that a header ``Authorization: Bearer KEY`` names, if it is one of ``keys``.

    All are compared, each in constant time: how long it takes says nothing. The header is text as HTTP libraries give it, a
    character a byte; keys are UTF-8.
    """
    scheme, _, given = authorization.partition(" ")
    asked = given.strip().encode("latin-1", "replace")
    found = [key for key in keys if hmac.compare_digest(key.encode(), asked)]
    return found[0] if found and scheme.lower() == "bearer" else None
