"""An attention backend of one's own, held to the protocol: what it does wrong is told in a sentence."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from refimpl.attention.backend import AttentionBackend, AttentionMetadata, AttentionStep
from refimpl.cache.kv_cache import LayerKV
from refimpl.errors import PartError


class CheckedBackend:
    """Passes all calls on, and checks what comes back. A wrong answer ends the step's requests; the engine goes on."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.name = backend.name

    def begin_step(self, metadata: AttentionMetadata) -> AttentionStep:
        """The backend's own step, checked.

        Raises:
            PartError: it cannot write and attend.

        """
        step = self._backend.begin_step(metadata)
        lacking = [name for name in ("write", "attend") if not callable(getattr(step, name, None))]
        if lacking:
            raise PartError(
                f"attention backend {self.name!r}: begin_step returned a {type(step).__name__} without "
                f"{' and '.join(lacking)}; return an object with write(layer_kv, key, value) and attend(layer_kv, query)"
            )
        return _CheckedStep(step, self.name)


class _CheckedStep:
    def __init__(self, step: AttentionStep, name: str) -> None:
        self._step = step
        self._name = name

    def write(self, layer_kv: LayerKV, key: Float[Tensor, "T Hkv D"], value: Float[Tensor, "T Hkv D"]) -> None:
        self._step.write(layer_kv, key, value)

    def attend(
        self, layer_kv: LayerKV, query: Float[Tensor, "T Hq D"], window: int | None = None
    ) -> Float[Tensor, "T Hq D"]:
        attended: object = self._step.attend(layer_kv, query, *(() if window is None else (window,)))
        if not isinstance(attended, Tensor) or (attended.shape, attended.dtype) != (query.shape, query.dtype):
            raise PartError(
                f"attention backend {self._name!r}: attend returned {_described(attended)}; it must be "
                f"{_described(query)}, as the query"
            )
        return attended


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{list(value.shape)} in {str(value.dtype).removeprefix('torch.')}"
