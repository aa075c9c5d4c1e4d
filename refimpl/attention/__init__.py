"""Attention backends: how a step's queries read the paged cache."""

from refimpl.attention.backend import LEAST_FOR_PREFILL, AttentionBackend, AttentionMetadata, AttentionStep
from refimpl.attention.checked import CheckedBackend
from refimpl.attention.choice import BackendChoice, Setting, backend_choice, choose_backend
from refimpl.attention.torch_paged import TorchPagedAttention

__all__ = [
    "LEAST_FOR_PREFILL",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionStep",
    "BackendChoice",
    "CheckedBackend",
    "Setting",
    "TorchPagedAttention",
    "backend_choice",
    "choose_backend",
]
