"""What has to be closed is closed at the end of a block, whatever ends it."""

import asyncio

import pytest

from refimpl.closing import AsyncClosing


class Door(AsyncClosing):
    def __init__(self):
        self.closed = []

    def close(self):
        self.closed.append("close")

    async def aclose(self):
        self.closed.append("aclose")


def test_a_block_closes_and_lets_its_error_through():
    with Door() as door:
        assert door.closed == []
    assert door.closed == ["close"]
    with pytest.raises(ValueError, match="within"), Door() as door:
        raise ValueError("within")
    assert door.closed == ["close"]


def test_an_async_block_closes_without_holding_up_the_loop():
    async def main():
        async with Door() as door:
            assert door.closed == []
        return door

    assert asyncio.run(main()).closed == ["aclose"]
