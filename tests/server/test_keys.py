"""Keys that clients give."""

import pytest

from refimpl.server.keys import given_key


@pytest.mark.parametrize(
    ("authorization", "key"),
    [
        ("Bearer one", "one"),
        ("bearer  two ", "two"),
        ("Bearer " + "schlüssel".encode().decode("latin-1"), "schlüssel"),  # as its bytes come over HTTP
        ("Bearer on", None),
        ("Basic one", None),
        ("Bearer", None),
        ("", None),
    ],
)
def test_a_key_is_found_by_its_bytes(authorization, key):
    assert given_key(authorization, ["one", "two", "schlüssel"]) == key
