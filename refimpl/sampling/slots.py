"""SamplingSlots: the sampling parameters of the running sequences by slot, and those of a step's rows.

The few numbers that most requests set have one place a slot, on the host: a device sees those of the rows that draw, once
for as long as the rows stay the same. All else is kept by slot only where it is asked for, so the others cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from refimpl.kernels.transfer import array_to_device, to_device
from refimpl.outputs import Admission
from refimpl.sampling.adjustments import Adjustments, Cells, Penalties, Words
from refimpl.sampling.bad_words import WordTable
from refimpl.sampling.hooks import missing_hook
from refimpl.sampling.sampler import SamplingRows
from refimpl.sampling_numbers import SamplingNumbers
from refimpl.sampling_params import GREEDY_BELOW, LogitsHook, LogitsHooks


@dataclass(frozen=True)
class _Asked:
    """What one slot asks for beyond temperature and filters, with its ids on the device."""

    num_prompt_tokens: int
    may_end_at: int
    """Tokens, prompt and output, from which on an ending id may be drawn."""
    allowed: Int64[Tensor, "num_allowed"]
    forbidden: Int64[Tensor, "num_forbidden"]
    """Bad words of one token."""
    endings: Int64[Tensor, "num_endings"]
    words: WordTable | None
    bias_ids: Int64[Tensor, "num_biased"]
    bias: Float32[Tensor, "num_biased"]
    penalties: tuple[float, float, float] | None
    """Presence, frequency, repetition."""
    hooks: tuple[LogitsHook, ...] = field(default=())

    @property
    def always(self) -> bool:
        """Whether something is asked for at every length."""
        ids = len(self.allowed) + len(self.forbidden) + len(self.bias_ids)
        return bool(ids or self.words or self.penalties or self.hooks)


class SamplingSlots:
    """State of ``N`` slots. ``hooks`` are those of single requests, ``engine_hook`` is called for every row, before them."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        hooks: LogitsHooks | None = None,
        engine_hook: LogitsHook | None = None,
    ) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self._hooks = {} if hooks is None else hooks
        self._engine_hook = engine_hook
        N = max_num_seqs
        self._fractions = np.zeros((3, N), dtype=np.float32)  # temperature, top_p, min_p
        self._integers = np.zeros((3, N), dtype=np.int64)  # top_k, seed, path
        # Which rows need which work.
        self._random = np.zeros(N, dtype=bool)
        self._min_p_on = np.zeros(N, dtype=bool)
        self._ranked = np.zeros(N, dtype=bool)
        self._effective_top_k = np.zeros(N, dtype=np.int64)
        self._asks_until = np.zeros(N, dtype=np.int64)
        """The number of tokens up to which a slot asks for adjustments; 0: never."""
        self._asked: dict[int, _Asked] = {}

    def admit(self, admission: Admission) -> None:
        """Take in the parameters of a sequence that takes a slot."""
        slot, numbers = admission.slot, admission.sampling
        self._fractions[:, slot] = numbers.temperature, numbers.top_p, numbers.min_p
        self._integers[:, slot] = numbers.top_k, admission.seed, admission.path
        keeps_some = 0 < numbers.top_k < self.vocab_size
        self._random[slot] = numbers.temperature >= GREEDY_BELOW
        self._ranked[slot] = numbers.top_p < 1 or keeps_some
        self._min_p_on[slot] = numbers.min_p > 0
        self._effective_top_k[slot] = numbers.top_k if keeps_some else 0
        self._asked.pop(slot, None)
        self._asks_until[slot] = 0
        if numbers.adjusted or self._engine_hook is not None:
            asked = self._asked[slot] = self._asked_by(admission)
            self._asks_until[slot] = np.iinfo(np.int64).max if asked.always else asked.may_end_at

    def _asked_by(self, admission: Admission) -> _Asked:
        numbers = admission.sampling

        def on_device(ids: tuple[int, ...]) -> Int64[Tensor, "cells"]:
            return to_device(torch.tensor(ids, dtype=torch.int64), self.device)

        return _Asked(
            num_prompt_tokens=admission.num_prompt_tokens,
            may_end_at=admission.num_prompt_tokens + numbers.min_tokens if numbers.ending_ids else 0,
            allowed=on_device(numbers.allowed_token_ids),
            forbidden=on_device(tuple(word[0] for word in numbers.bad_word_ids if len(word) == 1)),
            endings=on_device(numbers.ending_ids),
            words=WordTable.of(list(numbers.bad_word_ids), self.device),
            bias_ids=on_device(tuple(token_id for token_id, _ in numbers.logit_bias)),
            bias=to_device(torch.tensor([bias for _, bias in numbers.logit_bias], dtype=torch.float32), self.device),
            penalties=_penalties(numbers),
            hooks=self._hooks_of(admission),
        )

    def _hooks_of(self, admission: Admission) -> tuple[LogitsHook, ...]:
        hooks = [] if self._engine_hook is None else [self._engine_hook]
        if admission.sampling.hooked:
            hooks.append(self._hooks.get(admission.sequence_id, missing_hook))
        return tuple(hooks)

    def asks(self, slots: np.ndarray) -> bool:
        """Whether any of these slots asks for adjustments, which hang on the exact number of its tokens."""
        return bool(self._asked) and bool(self._asks_until[slots].any())

    def rows(self, slots: np.ndarray, on_device: Int64[Tensor, "R"]) -> SamplingRows:
        """The parameters of rows that draw; they stay the same until a slot of theirs is given to another sequence."""
        random, ranked = self._random[slots], self._ranked[slots]
        temperature, top_p, min_p = self._columns(self._fractions, slots)
        top_k, seed, path = self._columns(self._integers, slots)
        return SamplingRows(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            path=path,
            position=torch.zeros_like(on_device),
            whole=np.flatnonzero(random & ~ranked).tolist(),
            ranked=np.flatnonzero(random & ranked).tolist(),
            min_p_on=bool((random & self._min_p_on[slots]).any()),
            largest_top_k=int((random * self._effective_top_k[slots]).max(initial=0)),
        )

    def at(
        self, rows: SamplingRows, slots: np.ndarray, num_tokens: np.ndarray, token_ids: Int64[Tensor, "N L"]
    ) -> SamplingRows:
        """The same rows where their sequences have so many tokens; ``token_ids`` are those of all slots."""
        adjustments = self._adjustments(slots, num_tokens, token_ids)
        return replace(rows, position=self._to_device(num_tokens), adjustments=adjustments)

    def _adjustments(self, slots: np.ndarray, num_tokens: np.ndarray, token_ids: Int64[Tensor, "N L"]) -> Adjustments | None:
        if not self._asked:
            return None
        rows = np.flatnonzero(num_tokens < self._asks_until[slots])
        if not len(rows):
            return None
        chosen, lengths = slots[rows], num_tokens[rows]
        asked = [self._asked[slot] for slot in chosen.tolist()]
        ends = [
            one.endings if length < one.may_end_at else one.endings[:0] for one, length in zip(asked, lengths, strict=True)
        ]
        return Adjustments(
            rows=rows.tolist(),
            token_ids=token_ids[self._to_device(chosen), : int(lengths.max())],
            num_tokens=self._to_device(lengths),
            num_prompt_tokens=self._to_device(np.array([one.num_prompt_tokens for one in asked])),
            lengths=lengths.tolist(),
            allowed=self._cells([one.allowed for one in asked]),
            forbidden=self._cells([torch.cat((one.forbidden, end)) for one, end in zip(asked, ends, strict=True)]),
            words=self._words([one.words for one in asked]),
            bias=self._cells([one.bias_ids for one in asked], [one.bias for one in asked]),
            penalties=self._penalty_rows([one.penalties for one in asked]),
            hooks={row: one.hooks for row, one in enumerate(asked) if one.hooks},
        )

    def _cells(self, ids: list[Tensor], values: list[Tensor] | None = None) -> Cells | None:
        if not any(map(len, ids)):
            return None
        return Cells(self._row_numbers(ids), torch.cat(ids), None if values is None else torch.cat(values))

    def _words(self, tables: list[WordTable | None]) -> Words | None:
        found = [(row, table) for row, table in enumerate(tables) if table is not None]
        if not found:
            return None
        width = max(table.heads.shape[1] for _, table in found)
        return Words(
            rows=self._row_numbers([table.lasts if table else torch.empty(0) for table in tables]),
            heads=torch.cat([table.widened(width) for _, table in found]),
            lasts=torch.cat([table.lasts for _, table in found]),
        )

    def _penalty_rows(self, penalties: list[tuple[float, float, float] | None]) -> Penalties | None:
        found = [(row, three) for row, three in enumerate(penalties) if three is not None]
        if not found:
            return None
        columns = to_device(torch.tensor([three for _, three in found], dtype=torch.float32).T.contiguous(), self.device)
        return Penalties(self._to_device(np.array([row for row, _ in found])), *columns)

    def _row_numbers(self, parts: list[Tensor]) -> Int64[Tensor, "cells"]:
        """The number of the row that each element of the parts, laid end to end, is of."""
        return self._to_device(np.repeat(np.arange(len(parts)), [len(part) for part in parts]))

    def _columns(self, numbers: np.ndarray, slots: np.ndarray) -> list[Tensor]:
        """Those of some slots, each row of ``numbers`` for itself."""
        aligned = -(-len(slots) // 4) * 4  # 16 bytes: Triton compiles anew for a pointer that is less
        columns = np.zeros((len(numbers), aligned), numbers.dtype)
        columns[:, : len(slots)] = numbers[:, slots]
        return [row[: len(slots)] for row in array_to_device(columns, self.device)]

    def _to_device(self, array: np.ndarray) -> Int64[Tensor, "size"]:
        return array_to_device(array, self.device, torch.int64)


def _penalties(numbers: SamplingNumbers) -> tuple[float, float, float] | None:
    three = (numbers.presence_penalty, numbers.frequency_penalty, numbers.repetition_penalty)
    return three if numbers.penalised else None
