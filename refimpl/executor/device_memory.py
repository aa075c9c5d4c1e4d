"""How a GPU's memory is divided: what each part takes, and how many blocks another setting would leave room for.

Bytes in, bytes out; :mod:`refimpl.executor.gpu_memory` measures what goes in. The whole sum::

    total = taken before + weights + libraries + activations + sampler + batch + CUDA graphs + KV cache + kept free
            └────────────── gpu_memory_utilization allows a share of the total ───────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from refimpl.config import GIB
from refimpl.executor.cuda_graphs import graph_sizes
from refimpl.executor.memory import ENOUGH
from refimpl.executor.mixed_graphs import mixed_sizes, recorded_sets
from refimpl.memory_report import MemoryPart, SettingChange

LOGITS_COPIES = 9
"""Float32 copies of a row's logits that are there at once when it is adjusted, filtered and sampled, at most."""


class Grows(msgspec.Struct, frozen=True):
    """Bytes that grow with a number of tokens or rows."""

    fixed: float = 0.0
    each: float = 0.0

    @classmethod
    def through(cls, count: int, num_bytes: int, fewer: int, fewer_bytes: int) -> Grows:
        """The line through two measurements; it rises, and begins at 0 or above."""
        each = max(0.0, (num_bytes - fewer_bytes) / (count - fewer)) if count > fewer else num_bytes / count
        each = min(each, num_bytes / count)
        return cls(num_bytes - each * count, each)

    def at(self, count: int) -> int:
        """Bytes for so many."""
        return round(self.fixed + self.each * count)


class Quantised(msgspec.Struct, frozen=True):
    """What the weights would take by another method."""

    method: str
    """As ``EngineArgs.quantization`` names it."""
    weights: int
    of_any_dtype: int
    """The part that is quantised."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU held, what an engine needs on it, and the settings that this hangs on. Bytes."""

    total: int
    taken: int
    """Before the engine began: CUDA itself, other programs, and what this process held."""
    of_this_process: int
    """The part of it that torch held for this process: other engines, and a notebook's tensors."""
    weights: int
    weights_of_any_dtype: int = 0
    """Of them, what is quantised, and would be the same in another dtype."""
    smaller: tuple[Quantised, ...] = ()
    """Methods that the device has, and that are not on: the mildest first."""
    libraries: int = 0
    """Compiled kernels and the workspaces of libraries, once they have run."""
    activations: Grows = Grows()
    """Of a step, by its tokens."""
    graph_pool: Grows = Grows()
    """What lies between the kernels of the largest CUDA graphs, and their recordings: that of a step with prompts, which is
    fixed, and what one of decodes takes beside it, by its rows."""
    graph_each: int = 0
    """Of each further graph."""
    staging: int = 0
    """Of swapped blocks on their way to the host and back."""
    vocab_size: int
    block_bytes: int
    block_size: int
    bytes_per_value: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    gpu_memory_utilization: float
    laws_a_row: int = 1
    """Rows of logits of each sequence: one, and one for each draft."""
    graphs: bool = False
    """Whether CUDA graphs of decodes are recorded."""
    mixed_graphs: bool = False
    """Whether the same are of steps with prompts."""
    measured: bool = True
    """Whether a step was run to see what it needs; it is not where options fix the cache's size."""

    @property
    def step_tokens(self) -> int:
        """The most tokens that a step can have: its budget, or every sequence at its longest."""
        return min(self.max_num_batched_tokens, self.max_num_seqs * self.max_model_len)

    @property
    def activation_bytes(self) -> int:
        """Of the largest step."""
        return self.activations.at(self.step_tokens)

    @property
    def sampler_bytes(self) -> int:
        """Logits of a full batch and what is made of them: reckoned, not measured."""
        return LOGITS_COPIES * 4 * self.max_num_seqs * self.laws_a_row * self.vocab_size

    @property
    def batch_bytes(self) -> int:
        """Token ids and block table of every slot."""
        return self.max_num_seqs * (8 * self.max_model_len + 4 * -(-self.max_model_len // self.block_size))

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that are recorded."""
        rows, tokens = graph_sizes(self.max_num_seqs)[-1], mixed_sizes(self.max_num_batched_tokens)
        mixed = sum(len(sizes) for _, sizes in recorded_sets(tokens, rows)) if self.mixed_graphs else 0
        return len(graph_sizes(self.max_num_seqs)) + mixed if self.graphs else 0

    @property
    def graph_bytes(self) -> int:
        """Of all of them."""
        if not self.graphs:
            return 0
        return self.graph_pool.at(graph_sizes(self.max_num_seqs)[-1]) + self.graph_each * (self.num_graphs - 1)

    @property
    def held(self) -> int:
        """What is on the card before the cache is made."""
        return self.taken + self.weights + self.libraries

    @property
    def beside(self) -> int:
        """What the engine will need beside weights and cache."""
        return self.activation_bytes + self.sampler_bytes + self.batch_bytes + self.graph_bytes + self.staging

    @property
    def allowed(self) -> int:
        """The share of the card that may be used, by whomever."""
        return int(self.total * self.gpu_memory_utilization)

    @property
    def left(self) -> int:
        """What the share leaves for the cache; below 0 where it does not hold the rest."""
        return self.allowed - self.held - self.beside

    @property
    def enough(self) -> int:
        """Bytes beyond which a larger cache would only cost: room for every slot at its longest, and more for prefixes."""
        return (ENOUGH * self.max_num_seqs * self.blocks_of(self.max_model_len) + 1) * self.block_bytes

    @property
    def num_blocks(self) -> int:
        """Usable blocks that fit, the null block left out; 0 or below where none does."""
        return min(self.left, self.enough) // self.block_bytes - 1

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that so many tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def parts(self, num_blocks: int) -> tuple[MemoryPart, ...]:
        """The whole card, part by part, with a cache of so many blocks; what is kept free is the rest of the sum."""
        others, longest = self.taken - self.of_this_process, min(self.max_model_len, num_blocks * self.block_size)
        more = "; more would serve nothing that can run at once" if self.measured and self.left > self.enough else ""
        slots = f"{self.max_num_seqs:,} slots of {longest:,} tokens"
        parts = [
            MemoryPart("others, and CUDA itself", others, "before this engine began"),
            MemoryPart(
                "held by this process", self.of_this_process, "other engines, tensors" if self.of_this_process else ""
            ),
            MemoryPart("weights", self.weights, ""),
            MemoryPart("kernels and libraries", self.libraries, "" if self.measured else "not measured"),
            MemoryPart("activations, peak", self.activation_bytes, self._activations_note()),
            MemoryPart(
                "sampler, at most",
                self.sampler_bytes,
                f"{self.max_num_seqs * self.laws_a_row:,} rows of {self.vocab_size:,} logits",
            ),
            MemoryPart("batch by slot", self.with_(max_model_len=longest).batch_bytes, slots),
            MemoryPart("CUDA graphs", self.graph_bytes, f"{self.num_graphs}" if self.num_graphs else "none"),
            MemoryPart("swapped blocks", self.staging, "on their way" if self.staging else "no swap_space"),
            MemoryPart("KV cache", (num_blocks + 1) * self.block_bytes, f"{num_blocks:,} blocks, and the null block{more}"),
        ]
        share = f"gpu_memory_utilization is {self.gpu_memory_utilization:g}" if self.measured else ""
        rest = self.total - sum(part.num_bytes for part in parts)
        return (*parts, MemoryPart("kept free", rest, share), MemoryPart("the whole card", self.total, ""))

    def _activations_note(self) -> str:
        return f"of a step of {self.step_tokens:,} tokens" if self.measured else "not measured: the cache's size is given"

    def changes(self) -> tuple[SettingChange, ...]:
        """What each setting, changed alone, would make of the cache. A larger one may be held back by what is enough."""
        if not self.measured:
            return ()
        own = self.num_blocks
        return tuple(
            SettingChange(setting, max(0, other.num_blocks), other.num_blocks * other.block_size - own * self.block_size)
            for setting, other in self._others()
        )

    def _others(self) -> Iterator[tuple[str, DeviceMemory]]:
        if self.max_num_batched_tokens // 2 >= self.max_num_seqs:
            half = self.max_num_batched_tokens // 2
            yield f"max_num_batched_tokens={half}", self.with_(max_num_batched_tokens=half)
        if self.max_num_seqs > 1:
            yield f"max_num_seqs={self.max_num_seqs // 2}", self.with_(max_num_seqs=self.max_num_seqs // 2)
        if self.max_model_len > 1:
            yield f"max_model_len={self.max_model_len // 2}", self.with_(max_model_len=self.max_model_len // 2)
        if self.graphs:
            yield "enforce_eager=True", self.with_(graphs=False)
        if self.gpu_memory_utilization < 0.95:
            yield "gpu_memory_utilization=0.95", self.with_(gpu_memory_utilization=0.95)
        yield f"block_size={2 * self.block_size}", self.in_blocks_of(2 * self.block_size)
        if self.bytes_per_value > 2:
            yield "dtype of 16 bits", self.in_16_bits()
        for other in self.smaller:
            yield f"quantization={other.method}", self.quantised(other)

    def with_(self, **settings: object) -> DeviceMemory:
        """The same engine with other settings."""
        return msgspec.structs.replace(self, **settings)

    def in_blocks_of(self, block_size: int) -> DeviceMemory:
        """The same engine with blocks of another size."""
        return self.with_(block_size=block_size, block_bytes=self.block_bytes * block_size // self.block_size)

    def in_16_bits(self) -> DeviceMemory:
        """The same engine with weights, cache and activations of half or a quarter as many bytes."""
        times, quantised = self.bytes_per_value // 2, self.weights_of_any_dtype
        smaller = (
            msgspec.structs.replace(other, weights=other.of_any_dtype + (other.weights - other.of_any_dtype) // times)
            for other in self.smaller
        )
        return self.with_(
            weights=quantised + (self.weights - quantised) // times,
            smaller=tuple(smaller),
            block_bytes=self.block_bytes // times,
            activations=Grows(self.activations.fixed / times, self.activations.each / times),
            bytes_per_value=2,
        )

    def quantised(self, other: Quantised) -> DeviceMemory:
        """The same engine with its layers' matrices held by another method; what a step takes beside is left as it is."""
        return self.with_(weights=other.weights, weights_of_any_dtype=other.of_any_dtype, smaller=())


def gib(num_bytes: int) -> str:
    """Bytes for people: GiB, or MiB and bytes where those are few."""
    if abs(num_bytes) >= GIB // 10:
        return f"{num_bytes / GIB:,.2f} GiB"
    return f"{num_bytes / 1024**2:,.2f} MiB" if abs(num_bytes) >= 100_000 else f"{num_bytes:,} bytes"
