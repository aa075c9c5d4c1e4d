"""The layout of a GGUF file, read with suspicion: every length is held against the file's size before it is believed.

::

    "GGUF" version │ counts │ key, type, value … (metadata) │ name, shape, type, offset … (tensors) │ padding │ tensor data

Vocabulary and merges are stepped over here (transformers reads them), so that opening a file takes milliseconds.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from refimpl.errors import CheckpointError, UnsupportedModelError

VERSIONS = (2, 3)
MAX_ENTRIES = 100_000
"""Most tensors, and most metadata keys: more than any model has."""
MAX_ARRAY = 10_000_000
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letter of each value type that is one number."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as torch has it; the file lists dimensions the other way round."""
    type: Any
    """gguf.GGMLQuantizationType."""
    start: int
    """Where its data begin, in bytes from the start of the file."""
    row_bytes: int


class GGUFFile:
    """The metadata (numbers, strings and arrays of numbers) and the tensors of a GGUF file.

    Raises:
        CheckpointError: the file is no GGUF file, or is damaged or cut short.
        UnsupportedModelError: it holds a tensor of a type that the gguf package does not know.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(
                    f"{path} is no GGUF file (it does not begin with GGUF); for a Hugging Face checkpoint give its folder"
                )
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 4
        try:
            self._read()
        except UnicodeDecodeError as error:
            raise self._damaged(f"a name is no text: {error}") from error

    def data(self, tensor: GGUFTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a tensor, ``[*rows, row_bytes]``, mapped from the file."""
        shape = (*tensor.shape[:-1], tensor.row_bytes)
        return np.frombuffer(self._bytes, np.uint8, math.prod(shape), tensor.start).reshape(shape)

    def _read(self) -> None:
        version, num_tensors, num_keys = self._take("IQQ")
        if version not in VERSIONS or num_tensors > MAX_ENTRIES or num_keys > MAX_ENTRIES:
            raise self._damaged(
                f"it claims GGUF version {version}, {num_tensors} tensors and {num_keys} metadata keys; refimpl reads "
                f"versions 2 and 3 with at most {MAX_ENTRIES} of each"
            )
        for _ in range(num_keys):
            key = self._string()
            value = self._value(self._take("I")[0])
            if value is not None:
                self.metadata[key] = value
        table = [self._table_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment is {alignment!r}")
        data_start = -(-self._at // alignment) * alignment
        for name, shape, number, offset in table:
            self._add_tensor(name, shape, number, data_start + offset)

    def _add_tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise UnsupportedModelError(
                f"{self.path}: the tensor {name} has type {number}, which the gguf package does not know: the file is "
                "damaged, or newer than the package (pip install -U gguf)"
            ) from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self._damaged(f"rows of {name} have {shape[-1]} values, no multiple of the {block} of type {kind.name}")
        tensor = GGUFTensor(name, shape, kind, start, shape[-1] // block * block_bytes)
        end = start + math.prod(shape[:-1]) * tensor.row_bytes
        if end > len(self._bytes):
            raise self._damaged(f"{name} ends at byte {end} of {len(self._bytes)}")
        if name in self.tensors:
            raise self._damaged(f"it lists {name} twice")
        self.tensors[name] = tensor

    def _table_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dimensions,) = self._take("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"{name} has {num_dimensions} dimensions")
        shape = tuple(reversed(self._take(f"{num_dimensions}Q")))
        if 0 in shape:
            raise self._damaged(f"{name} has the shape {list(shape)}")
        number, offset = self._take("IQ")
        return name, shape, number, offset

    def _value(self, kind: int) -> Any:
        """One metadata value; None for an array of strings, which is stepped over."""
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._damaged(f"it has a metadata value of type {kind}")
        item, count = self._take("IQ")
        if count > MAX_ARRAY:
            raise self._damaged(f"it has an array of {count} values; the most that refimpl reads is {MAX_ARRAY}")
        if item in _SCALARS:
            return self._take(f"{count}{_SCALARS[item]}")
        if item != _STRING:
            raise self._damaged(f"it has an array of type {item}")
        for _ in range(count):
            self._skip(self._take("Q")[0])
        return None

    def _string(self) -> str:
        start = self._at + 8
        self._skip(self._take("Q")[0])
        return self._bytes[start : self._at].decode("utf-8")

    def _take(self, layout: str) -> tuple[Any, ...]:
        """The next numbers, little-endian and unpadded."""
        start = self._at
        self._skip(struct.calcsize(f"<{layout}"))
        return struct.unpack_from(f"<{layout}", self._bytes, start)

    def _skip(self, count: int) -> None:
        if count > len(self._bytes) - self._at:
            raise self._damaged(f"at byte {self._at} it promises {count} more, but ends at {len(self._bytes)}")
        self._at += count

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or cut short ({what}); download it again")
