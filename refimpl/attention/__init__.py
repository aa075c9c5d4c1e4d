"""Attention backends: how a step's queries read the paged cache."""

from typing import Any

from refimpl.attention.backend import AttentionBackend, AttentionMetadata, AttentionStep
from refimpl.attention.checked import CheckedBackend
from refimpl.attention.torch_paged import TorchPagedAttention

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionStep",
    "TorchPagedAttention",
    "backend_choice",
    "choose_backend",
]


def backend_choice(backend: Any) -> tuple[str, str]:
    """The name of the backend that ``attention_backend`` comes to, and why."""
    if not isinstance(backend, str):
        return backend.name, "an object of your own"
    return TorchPagedAttention.name, "runs on every device; there is no other yet" if backend == "auto" else "as asked for"


def choose_backend(backend: Any, head_dim: int) -> AttentionBackend:
    """The backend of ``attention_backend`` (EngineArgs has checked it): a name, scaling scores by ``head_dim ** -0.5``, or
    an object of the user's, whose answers are checked.
    """
    if not isinstance(backend, str):
        return CheckedBackend(backend)
    return TorchPagedAttention(softmax_scale=head_dim**-0.5)  # "auto" and "torch" are the same until there is a second one
