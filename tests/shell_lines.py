"""The commands that the project's texts tell a reader to type."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "refimpl/server/README.md")
FENCED = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
BEGINS = re.compile(r"(?:\$ )?((?:refimpl|curl) .*)", re.DOTALL)
INLINE = re.compile(r"`(refimpl [^`]+)`")


def commands(program):
    """Those of ``refimpl`` or ``curl``, each once, as lists of words."""
    found = {}
    for name in TEXTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        lines = [line for block in FENCED.findall(text) for line in _whole(block)] + INLINE.findall(FENCED.sub("", text))
        found |= {tuple(words): None for line in lines if (words := shlex.split(line, comments=True))[0] == program}
    return [list(words) for words in found]


def _whole(block):
    """A block's commands; one goes on in the next line behind a backslash, or while a quote is open."""
    command = ""
    for line in block.split("\n"):
        if command:
            command += line
        elif begins := BEGINS.match(line):
            command = begins[1]
        if command.endswith("\\"):
            command = command[:-1]
        elif command and _closed(command):
            yield command
            command = ""


def _closed(command):
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True
