"""AwqPart: some outputs of a matrix in 4 bits, filled from a checkpoint of AWQ or GPTQ, from wider weights, or by chance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from refimpl.errors import CheckpointError
from refimpl.kernels import awq_reference
from refimpl.quantization.awq_layout import (
    IN_A_WORD,
    LARGEST,
    check_groups,
    quantise_groups,
    unpack_awq,
    unpack_in_order,
)
from refimpl.quantization.stored import StoredTensor, check_finite
from refimpl.quantization_config import QuantizationConfig

ROWS_AT_ONCE = 4096
"""Outputs that are repacked together: what that takes beside are some bytes for each of their weights."""
SCALES = (torch.float16, torch.bfloat16, torch.float32)
STD_OF_VALUES = ((16**2 - 1) / 12 + 1 / 4) ** 0.5
"""Of a number from 0 to 15 less 7 or 8, all by chance."""


class AwqPart:
    """Outputs ``[first, first + size)``: a :class:`Destination`."""

    def __init__(
        self, words: Tensor, scales: Tensor, zeros: Tensor, first: int, size: int, in_features: int, group_size: int
    ) -> None:
        outputs = slice(first, first + size)
        self._words, self._scales, self._zeros = words, scales[:, outputs], zeros[:, outputs]
        self._in_features, self._group_size, self._first, self._size = in_features, group_size, first, size
        self._groups = in_features // group_size

    @property
    def shape(self) -> torch.Size:
        """Of the matrix that fills it."""
        return torch.Size((self._size, self._in_features))

    @property
    def device(self) -> torch.device:
        """Where it is held."""
        return self._words.device

    def copy_(self, source: Float[Tensor, "R C"], /) -> None:
        """Round 16-bit weights to the nearest."""
        for first in range(0, self._size, ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            values, zeros, scales = quantise_groups(source[rows].to(self.device), self._group_size)
            self._put_values(first, values.T)
            self._scales[:, rows] = self._packed_scales(scales)
            self._zeros[:, rows] = self._packed_zeros(zeros)

    def normal_(self, mean: float, std: float, /, *, generator: torch.Generator | None = None) -> None:
        """Fill it by chance, without drawing a weight: all bits of the words, zero points 7 and 8, and one scale.

        Weights are evenly spread about ``mean`` 0, the only one that there is, with the standard deviation ``std``.
        """
        assert mean == 0
        for first in range(0, self._size, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, self._size - first)
            rows = self._words.new_empty(count, *self._words.shape[1:3], self._words.shape[4])
            rows.random_(-(2**31), 2**31, generator=generator)
            awq_reference.put_rows(self._words, self._first + first, rows)
        sizes, kind = (self._groups, self._size), torch.uint8
        zeros = torch.randint(7, 9, sizes, dtype=kind, device=self.device, generator=generator)
        self._zeros.copy_(self._packed_zeros(zeros))
        self._scales.copy_(self._packed_scales(self._scales.new_full(sizes, std / STD_OF_VALUES)))

    def stored(self, config: QuantizationConfig, name: str) -> dict[str, StoredTensor]:
        """The tensors of a checkpoint: values, zero points and scales, and GPTQ's order of inputs.

        Raises:
            CheckpointError: the matrix's sizes do not fit words of 8 numbers, or whole groups.

        """
        check_groups(name, self._in_features, config.group_size)
        if self._size % IN_A_WORD:
            raise CheckpointError(
                f"{name} has {self._size} outputs; 4-bit weights come by {IN_A_WORD}, so it must be a multiple"
            )
        size = self._in_features if config.group_size == -1 else config.group_size
        groups, repeats = self._in_features // size, size // self._group_size
        by_groups = None if config.group_size == -1 else (0, size)
        found = {
            "qweight": self._qweight(config.method),
            "qzeros": StoredTensor(
                ((groups, self._size // IN_A_WORD),),
                (torch.int32,),
                self.device,
                partial(self._take_zeros, config, repeats),
                optional=not config.zero_point,
                outputs=(1, IN_A_WORD),
                inputs=by_groups,
            ),
            "scales": StoredTensor(
                ((groups, self._size),),
                SCALES,
                self.device,
                partial(self._take_scales, f"{name}.scales", repeats),
                outputs=(1, 1),
                inputs=by_groups,
            ),
        }
        if config.method == "gptq":
            shape, order = ((self._in_features,),), partial(_check_order, f"{name}.g_idx", size)
            kinds = (torch.int32, torch.int64)
            found["g_idx"] = StoredTensor(shape, kinds, self.device, order, optional=True, inputs=(0, 1))
        return found

    def _qweight(self, method: str) -> StoredTensor:
        if method == "awq":
            shape, unpacked = (self._in_features, self._size // IN_A_WORD), _awq_values
            outputs, inputs = (1, IN_A_WORD), (0, 1)
        else:
            shape, unpacked = (self._in_features // IN_A_WORD, self._size), _gptq_values
            outputs, inputs = (1, 1), (0, IN_A_WORD)
        take = partial(self._take_values, unpacked)
        return StoredTensor((shape,), (torch.int32,), self.device, take, outputs=outputs, inputs=inputs)

    def _take_values(self, unpacked: Callable[[Tensor, int, int], UInt8[Tensor, "R C"]], source: Tensor) -> None:
        source = source.to(self.device)
        for first in range(0, self._size, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, self._size)
            self._put_values(first, unpacked(source, first, last))

    def _put_values(self, first: int, values: UInt8[Tensor, "R in"]) -> None:
        awq_reference.put_rows(self._words, self._first + first, awq_reference.row_words(values, self._group_size))

    def _take_zeros(self, config: QuantizationConfig, repeats: int, source: Tensor) -> None:
        unpack = unpack_awq if config.method == "awq" else unpack_in_order
        zeros = (unpack(source.to(self.device)) + int(config.zeros_less_one)) & LARGEST
        self._zeros.copy_(self._packed_zeros(zeros.repeat_interleave(repeats, 0)))

    def _packed_zeros(self, zeros: UInt8[Tensor, "groups R"]) -> Tensor:
        return awq_reference.pack_zeros(self._filled_up(zeros))

    def _packed_scales(self, scales: Float[Tensor, "groups R"]) -> Tensor:
        return awq_reference.pack_scales(self._filled_up(scales))

    def _filled_up(self, groups: Tensor) -> Tensor:
        return torch.nn.functional.pad(groups, (0, 0, 0, -self._groups % awq_reference.GROUPS_IN_A_CHUNK))

    def _take_scales(self, name: str, repeats: int, source: Tensor) -> None:
        check_finite(name, source)
        most = torch.finfo(torch.float16).max
        kept = source.to(self.device).clamp(-most, most).to(torch.float16)
        self._scales.copy_(self._packed_scales(kept.repeat_interleave(repeats, 0)))


def _awq_values(qweight: Tensor, first: int, last: int) -> UInt8[Tensor, "R C"]:
    """Some outputs' numbers from AWQ's ``[in, out/8]``; both bounds are multiples of 8."""
    return unpack_awq(qweight[:, first // IN_A_WORD : last // IN_A_WORD]).T.contiguous()


def _gptq_values(qweight: Tensor, first: int, last: int) -> UInt8[Tensor, "R C"]:
    """Some outputs' numbers from GPTQ's ``[in/8, out]``."""
    return unpack_in_order(qweight[:, first:last].T)


def _check_order(name: str, group_size: int, groups: Tensor) -> None:
    if not torch.equal(groups.cpu().long() - int(groups[0]), torch.arange(len(groups)) // group_size):
        raise CheckpointError(
            f"{name} puts the inputs of a group all over the matrix (act-order), and refimpl's kernels read whole groups; "
            "use a checkpoint that was made with desc_act false"
        )
