"""Setup: what a rank must be told to load its share, in JSON. Objects of the engine's process cannot be sent.

Policies, allocators, prefix indexes, logits hooks and one's own proposers are asked by rank 0 alone, which is the engine's
process: the other ranks do without.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import msgspec

from refimpl.config import EngineArgs
from refimpl.errors import ConfigError
from refimpl.loading.dummy import ShapeCheckpoint
from refimpl.loading.pull import EMBEDDED_MODEL
from refimpl.models.tiny import TinyCheckpoint
from refimpl.outputs import SchedulerOutput
from refimpl.speculative.proposer import DraftRows, Drafts, Proposer
from refimpl.speculative_config import SpeculativeConfig

LOCAL = ("scheduling_policy", "block_allocator", "prefix_index", "logits_hook", "event_log_size", "model", "device")
"""Options that the other ranks are not told: what rank 0 alone asks, and what each is told otherwise."""


class Model(msgspec.Struct, frozen=True):
    """A model as another process can open it: a name or path, a tiny model's numbers, or a shape."""

    name: str | None = None
    tiny: TinyCheckpoint | None = None
    shape: ShapeCheckpoint | None = None

    @classmethod
    def of(cls, model: Any) -> Model:
        """Of an ``EngineArgs.model``.

        Raises:
            ConfigError: it is an object that only this process has.

        """
        if isinstance(model, TinyCheckpoint):
            return cls(tiny=model)
        if isinstance(model, ShapeCheckpoint):
            return cls(shape=model)
        if isinstance(model, str | Path):
            path = Path(os.path.expanduser(model))
            a_path = model not in ("tiny", EMBEDDED_MODEL) and path.exists()
            return cls(name=str(path.resolve()) if a_path else str(model))
        raise ConfigError(
            f"the model is a {type(model).__name__} in this process, where the other ranks of tensor_parallel_size > 1 "
            "cannot read it; save it to a folder, and give its path"
        )

    @property
    def opened(self) -> Any:
        """For ``EngineArgs.model``."""
        return self.tiny or self.shape or self.name


class Setup(msgspec.Struct, frozen=True):
    """What one rank is told."""

    options: dict[str, Any]
    """Of EngineArgs, by name."""
    speculative: dict[str, Any] | None
    """Of SpeculativeConfig, its model left out."""
    model: Model
    draft: Model | None
    device: str
    max_model_len: int
    """Tokens of a context, as rank 0 has checked it."""
    rank: int
    size: int

    def to_wire(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_wire(cls, data: bytes) -> Setup:
        """From JSON."""
        return msgspec.json.decode(data, type=cls)

    def args(self) -> EngineArgs:
        """The options of this rank's executor."""
        speculative = None
        if self.speculative is not None:
            options = dict(self.speculative)
            if options["method"] == _AskedElsewhere.name:
                options["method"] = _AskedElsewhere(options.pop("needs_token_ids"))
            speculative = SpeculativeConfig(**options, model=None if self.draft is None else self.draft.opened)
        options = dict(self.options, model=self.model.opened, device=self.device, speculative_config=speculative)
        return EngineArgs(**options)


class _AskedElsewhere(Proposer):
    """Stands on other ranks for a proposer that is an object of rank 0's process."""

    name = "asked on rank 0"

    def __init__(self, needs_token_ids: bool) -> None:
        self.needs_token_ids = needs_token_ids

    def propose(self, rows: DraftRows) -> Drafts:
        """Is asked on rank 0."""
        raise AssertionError("only rank 0 asks its proposer")


def make_setup(args: EngineArgs, rank: int, device: str, max_model_len: int) -> Setup:
    """What to tell a rank.

    Raises:
        ConfigError: an option is an object that only this process has.

    """
    if not isinstance(args.attention_backend, str):
        raise ConfigError(
            "attention_backend is an object of this process, which the other ranks of tensor_parallel_size > 1 do not have; "
            "use one by name"
        )
    options = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    config: SpeculativeConfig | None = options.pop("speculative_config")
    for name in LOCAL:
        del options[name]
    speculative, draft = (None, None) if config is None else _speculative(config)
    size = args.tensor_parallel_size
    return Setup(options, speculative, Model.of(args.model), draft, device, max_model_len, rank, size)


def _speculative(config: SpeculativeConfig) -> tuple[dict[str, Any], Model | None]:
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "model"}
    if isinstance(config.method, Proposer):
        options |= {"method": _AskedElsewhere.name, "needs_token_ids": config.method.needs_token_ids}
    model = None if config.model is None or config.method == "ngram" else Model.of(config.model)
    return options, model


def for_other_ranks(scheduler_output: SchedulerOutput) -> SchedulerOutput:
    """A step as the other ranks need it: they draw nothing, and so call no hook, which could not be sent."""
    if not any(admission.sampling.hooked for admission in scheduler_output.admitted):
        return scheduler_output
    admitted = tuple(
        msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, hooked=False))
        for one in scheduler_output.admitted
    )
    return msgspec.structs.replace(scheduler_output, admitted=admitted)
