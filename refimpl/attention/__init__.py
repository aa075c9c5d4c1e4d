"""Attention backends: how a step's queries read the paged cache."""

from refimpl.attention.backend import AttentionBackend, AttentionMetadata, AttentionStep
from refimpl.attention.torch_paged import TorchPagedAttention

__all__ = ["AttentionBackend", "AttentionMetadata", "AttentionStep", "TorchPagedAttention", "choose_backend"]


def choose_backend(name: str, head_dim: int) -> AttentionBackend:
    """The backend of a name (``attention_backend``; EngineArgs has checked it), scaling scores by ``head_dim ** -0.5``."""
    del name  # "auto" and "torch" are the same until there is a second one
    return TorchPagedAttention(softmax_scale=head_dim**-0.5)
