"""Every ``refimpl …`` that the project's texts tell to type is a command that there is, with options that it takes."""

import pytest
import typer
from shell_lines import commands

from refimpl.cli import app

COMMANDS = commands("refimpl")


def test_there_are_commands_of_every_kind():
    assert {"generate", "serve", "bench", "simulate", "quantize", "speculate", "doctor"} <= {words[1] for words in COMMANDS}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_is_one_that_the_command_line_takes(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE.yaml").write_text("port: 9")  # a file of options is read where it is named
    (tmp_path / "refimpl" / "bench" / "results").mkdir(parents=True)  # and --save names a folder that is there
    command, rest = typer.main.get_command(app), words[1:]
    while rest and (commands := getattr(command, "commands", None)):
        command = commands[rest.pop(0)]
    command.make_context(" ".join(words[:3]), [word for word in rest if word != "--help"])
