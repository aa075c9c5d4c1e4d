"""Checks of the fields of parameters: a sentence for each wrong value, and a plain form for each right one."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import msgspec

from refimpl.errors import SamplingParamsError


class NamesItsFields(type(msgspec.Struct)):  # type: ignore[misc]
    """Refuses unknown and missing parameters with a sentence that names them, where msgspec has a TypeError."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the parameters; the checks of their values are those of ``__post_init__``."""
        known = cls.__struct_fields__
        if args:
            raise SamplingParamsError(
                f"{cls.__name__} takes names only, as in {cls.__name__}({known[0]}=1), not {args[0]!r}"
            )
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=2)
                hint = f"did you mean {' or '.join(near)}?" if near else f"the parameters are {', '.join(known)}"
                raise SamplingParamsError(f"unknown sampling parameter {name!r}; {hint}")
        for name in _required(cls):
            if name not in kwargs:
                raise SamplingParamsError(f"{cls.__name__} needs {name}")
        return super().__call__(**kwargs)


@functools.cache
def _required(cls: type[msgspec.Struct]) -> tuple[str, ...]:
    """Fields without a default. msgspec evaluates every annotation to tell them, which takes a millisecond."""
    return tuple(field.name for field in msgspec.structs.fields(cls) if field.required)


class FieldChecks:
    """Checks of single fields; a value that passes is set again in its plain form (numpy's numbers as Python's, …)."""

    def __init__(self, params: msgspec.Struct) -> None:
        self._params = params

    def that(self, name: str, ok: Callable[[Any], bool], allowed: str) -> Any:
        """A field's value.

        Raises:
            SamplingParamsError: it is not ``ok``; the sentence says what is ``allowed``.

        """
        value = getattr(self._params, name)
        if not ok(value):
            raise SamplingParamsError(f"{name} is {value!r}; it must be {allowed}")
        return value

    def whole(self, name: str, least: int, most: float, allowed: str = "", none: bool = False) -> None:
        """A whole number within bounds; or None, where that is allowed."""
        allowed = allowed or f"a whole number from {least} to {most}"
        value = self.that(name, lambda v: (v is None and none) or (is_whole(v) and least <= v <= most), allowed)
        self.set(name, value if value is None else int(value))

    def number(self, name: str, least: float, most: float, allowed: str = "") -> None:
        """A number within bounds."""
        allowed = allowed or f"a number from {least:g} to {most:g}"
        self.set(name, float(self.that(name, lambda v: is_number(v) and least <= v <= most, allowed)))

    def flags(self, *names: str) -> None:
        """True or False."""
        for name in names:
            self.that(name, lambda value: isinstance(value, bool), "True or False")

    def ids(self, name: str, allowed: str = "a list of whole numbers, each 0 or more", empty: bool = True) -> None:
        """A list of token ids."""

        def right(value: Any) -> bool:
            return isinstance(value, tuple | list) and bool(empty or value) and all(is_whole(i) and i >= 0 for i in value)

        self.set(name, tuple(map(int, self.that(name, right, allowed))))

    def texts(self, name: str, allowed: str, full: Callable[[str], object]) -> None:
        """A list of texts, none of which may be empty in the sense of ``full``; a single stop string is one."""
        value = getattr(self._params, name)
        listed = (value,) if name == "stop" and isinstance(value, str) else () if value is None else value
        ok = isinstance(listed, tuple | list) and all(isinstance(text, str) and full(text) for text in listed)
        self.that(name, lambda _: ok, allowed)
        self.set(name, tuple(listed))

    def set(self, name: str, value: Any) -> None:
        """Put a field's value in its plain form; the struct is frozen for everybody else."""
        msgspec.structs.force_setattr(self._params, name, value)


def is_whole(value: object) -> bool:
    """Whether it is a whole number, numpy's too; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a real number; True is none."""
    return isinstance(value, Real) and not isinstance(value, bool)
