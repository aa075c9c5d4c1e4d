"""refimpl: the reference implementation of LLM inference.

>>> from refimpl import LLM, SamplingParams

Names are loaded when they are first used, so importing the package imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from refimpl.async_llm import AsyncLLM
    from refimpl.beam_params import BeamSearchParams
    from refimpl.config import EngineArgs
    from refimpl.engine import Engine
    from refimpl.events import EventLog
    from refimpl.interrupts import GenerationInterrupted
    from refimpl.llm import LLM
    from refimpl.loading.in_memory import TransformersCheckpoint
    from refimpl.logprobs import Logprob
    from refimpl.memory_report import MemoryReport
    from refimpl.models.tiny import tiny
    from refimpl.outputs import CompletionOutput, RequestOutput
    from refimpl.sampling_params import SamplingParams

_HOMES = {
    "BeamSearchParams": "refimpl.beam_params",
    "AsyncLLM": "refimpl.async_llm",
    "CompletionOutput": "refimpl.outputs",
    "Engine": "refimpl.engine",
    "EngineArgs": "refimpl.config",
    "EventLog": "refimpl.events",
    "GenerationInterrupted": "refimpl.interrupts",
    "LLM": "refimpl.llm",
    "Logprob": "refimpl.logprobs",
    "MemoryReport": "refimpl.memory_report",
    "RequestOutput": "refimpl.outputs",
    "SamplingParams": "refimpl.sampling_params",
    "TransformersCheckpoint": "refimpl.loading.in_memory",
    "tiny": "refimpl.models.tiny",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Engine",
    "EngineArgs",
    "EventLog",
    "GenerationInterrupted",
    "Logprob",
    "MemoryReport",
    "RequestOutput",
    "SamplingParams",
    "TransformersCheckpoint",
    "tiny",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'refimpl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
