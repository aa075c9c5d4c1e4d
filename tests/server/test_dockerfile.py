"""The Dockerfile, line by line: what it copies is there, and what it runs is what this project has."""

import re
import tomllib
from pathlib import Path

import pytest

from refimpl.server.command import serve

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
LINES = [line.split(None, 1) for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]
KNOWN = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "ENV", "VOLUME", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


def those(instruction):
    return [rest for name, rest in LINES if name == instruction]


def test_every_line_is_an_instruction_and_it_begins_with_a_base():
    assert {name for name, _ in LINES} <= KNOWN
    assert LINES[0][0] == "FROM"
    python = re.fullmatch(r"python:3\.(\d+)-slim", those("FROM")[0])
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    assert int(python[1]) >= int(wanted.removeprefix(">=3."))


def test_what_is_copied_is_there_and_is_all_that_the_wheel_needs():
    sources = [name for line in those("COPY") for name in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in sources)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not set(sources) & set(ignored)
    links = {path.name for path in (ROOT / "refimpl").iterdir() if path.is_symlink()}
    assert links | {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "refimpl"} == set(sources)


def test_it_installs_the_extra_and_runs_as_nobody_special():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    [install] = [line for line in those("RUN") if "pip install" in line]
    assert {name for found in re.findall(r"\.\[(.*?)\]", install) for name in found.split(",")} <= extras.keys()
    user = those("USER")[-1]
    assert user != "root"
    assert f"useradd --create-home {user}" in TEXT
    order = [name for name, _ in LINES]
    assert order.index("USER") > max(number for number, name in enumerate(order) if name == "RUN")


def test_it_starts_the_server_on_the_port_that_it_exposes():
    entry = eval(those("ENTRYPOINT")[0])
    assert entry[:2] == ["refimpl", "serve"]
    flags = dict(zip(entry[2::2], entry[3::2], strict=True))
    parameters = serve.__signature__.parameters
    assert flags == {"--host": "0.0.0.0"}
    assert all(name.removeprefix("--") in parameters for name in flags)
    assert int(those("EXPOSE")[0]) == parameters["port"].default
    [health] = those("HEALTHCHECK")
    assert f"127.0.0.1:{parameters['port'].default}/health" in health
    assert eval(those("CMD")[0]) == ["smollm2"]


@pytest.mark.parametrize("name", ["REFIMPL_CACHE", "HF_HOME"])
def test_models_are_kept_in_the_volume(name):
    [environment] = those("ENV")
    value = dict(pair.split("=") for pair in environment.split())[name]
    assert value.startswith(those("VOLUME")[0])
