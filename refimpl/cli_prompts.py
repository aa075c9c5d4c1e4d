"""A file of prompts on the command line: JSON lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from refimpl.errors import RefimplError


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a file, or of standard input ("-"), one a line: a string, or an object with "prompt" or
    "prompt_token_ids". Empty lines are left out.

    Raises:
        RefimplError: it cannot be read, or a line is something else.

    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RefimplError(f"the prompts file cannot be read: {error}") from error
    prompts: list[Any] = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would cut at U+2028, which JSON allows
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
        except ValueError as error:
            raise RefimplError(
                f"line {number} of {path} is no JSON ({error}); each line is an object or a string"
            ) from error
        if not isinstance(prompt, str) and not (isinstance(prompt, dict) and {"prompt", "prompt_token_ids"} & set(prompt)):
            raise RefimplError(f'line {number} of {path} must be a string, or an object with "prompt" or "prompt_token_ids"')
        prompts.append(prompt)
    return prompts
