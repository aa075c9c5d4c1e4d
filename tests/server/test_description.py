"""The OpenAPI description, and requests that are made from it at random: none of them is answered with a 5xx."""

from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from server_support import LiveServer, until

PATHS = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/{name}",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/version",
    "/load",
}


@pytest.fixture(scope="module")
def described():
    server = LiveServer()
    yield server
    until(server.idle)
    server.close()


def test_it_names_every_path_and_field(described):
    schema = described.http.get("/openapi.json").json()
    assert schema["paths"].keys() >= PATHS
    fields = schema["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "max_completion_tokens", "response_format", "top_k", "cache_salt"} <= fields.keys()
    for path in PATHS:
        for operation in schema["paths"][path].values():
            assert {"200", "400", "503"} <= operation["responses"].keys()


def test_requests_at_random_are_answered_without_a_5xx(described):
    schema = schemathesis.openapi.from_url(f"{described.url}/openapi.json")
    statuses = Counter()

    operations = [found.ok() for found in schema.get_all_operations()]
    for operation in operations:
        if operation.method == "get" and "{" not in operation.path:
            continue  # there is nothing to choose

        @given(case=operation.as_strategy())
        @settings(max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def ask(case):
            reply = case.call()
            statuses[reply.status_code] += 1
            assert reply.status_code < 500, reply.text
            if reply.status_code >= 400:
                assert reply.json()["error"].keys() == {"message", "type", "param", "code"}

        ask()
    assert statuses[200] > 5
    assert statuses[400] > 10
