"""One server for all tests that leave it as it was."""

import pytest
from server_support import LiveServer, until


@pytest.fixture(scope="session")
def shared_server():
    server = LiveServer()
    yield server
    server.close()


@pytest.fixture
def server(shared_server):
    """The server; whatever a test asks of it must be over in the end."""
    yield shared_server
    until(shared_server.idle)
