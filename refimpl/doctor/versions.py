"""Python and the packages: which are here, which are too old, and whether a missing one matters."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version

from refimpl.doctor.findings import Finding, Status

OPTIONAL = {
    "triton": "compiles GPU kernels; a CPU needs none",
    "flash-attn": "attention kernels of a GPU; refimpl runs without",
    "pandas": "EventLog.to_pandas()",
}
"""Packages that refimpl uses where they are."""


def declared() -> dict[str, tuple[str, str]]:
    """What refimpl's own metadata asks for: name → (least version, extra; "" for what it cannot do without)."""
    found: dict[str, tuple[str, str]] = {}
    try:
        lines = requires("refimpl") or []
    except PackageNotFoundError:
        return found
    for line in lines:
        match = re.match(r"([\w.-]+)\s*(?:>=\s*([\w.]+))?", line)
        extra = re.search(r"extra\s*==\s*['\"](\w+)['\"]", line)
        if match and match[1] != "refimpl":
            found.setdefault(match[1], (match[2] or "0", extra[1] if extra else ""))
    return found


def installed(name: str) -> str | None:
    """The version of a package, read without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_versions(look_up: Callable[[str], str | None] = installed) -> list[Finding]:
    """Python, refimpl, everything that it declares, and what it can use besides."""
    findings = [_python(), Finding("versions", "refimpl", look_up("refimpl") or "not installed (run from its folder)")]
    wanted = declared()
    for name, (least, extra) in wanted.items():
        if extra in ("", "notebooks"):
            findings.append(_package(name, look_up(name), least, extra))
    for name, purpose in OPTIONAL.items():
        found = look_up(name)
        findings.append(Finding("versions", name, found or "missing", "ok" if found else "note", "" if found else purpose))
    return findings


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    advice = "" if good else "refimpl needs Python 3.11 or later"
    return Finding("versions", "python", platform.python_version(), "ok" if good else "error", advice)


def _package(name: str, found: str | None, least: str, extra: str) -> Finding:
    bad: Status = "warning" if extra else "error"
    install = f'pip install "{name}>={least}"'
    if found is None:
        why = "the notebooks and widgets need it" if extra else "refimpl cannot run without it"
        return Finding("versions", name, "missing", bad, f"{why}: {install}")
    if _numbers(found) < _numbers(least):
        return Finding("versions", name, found, bad, f"{least} is the least that refimpl is tested with: {install}")
    return Finding("versions", name, found)


def _numbers(text: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as (2, 13, 0): enough to compare with a least version."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])
