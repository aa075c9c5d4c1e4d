"""Logits hooks: functions of a user, called for single rows. What they do wrong ends their own request alone."""

from __future__ import annotations

from collections.abc import Iterable

from jaxtyping import Float, Int64
from torch import Tensor

from refimpl.sampling_params import LogitsHook


class HookError(Exception):
    """A hook raised, or its answer cannot be used. The message is for the user."""


def call_hooks(hooks: Iterable[LogitsHook], token_ids: Int64[Tensor, "L"], logits: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
    """One row through hooks, in order. Each is given copies, so that it may write into them.

    Raises:
        HookError: one raised, or returned something else than logits of the same shape and dtype without NaN and +inf.

    """
    for hook in hooks:
        logits = _checked(_call(hook, token_ids.clone(), logits.clone()), logits, _name(hook))
    return logits


def missing_hook(token_ids: object, logits: object) -> Tensor:
    """Stands for a hook that is not in the registry; only a sequence that has ended meanwhile can lack its own."""
    raise RuntimeError("the hook is not known to this executor")


def _call(hook: LogitsHook, token_ids: Int64[Tensor, "L"], logits: Float[Tensor, "V"]) -> object:
    try:
        return hook(token_ids, logits)
    except Exception as error:  # a user's code raises whatever it likes
        raise HookError(f"the logits hook {_name(hook)} raised {error!r}") from error


def _checked(answer: object, given: Float[Tensor, "V"], name: str) -> Float[Tensor, "V"]:
    wanted = f"it must return {str(given.dtype).removeprefix('torch.')} logits of shape {tuple(given.shape)}"
    if not isinstance(answer, Tensor):
        raise HookError(f"the logits hook {name} returned a {type(answer).__name__}; {wanted}")
    if answer.shape != given.shape or answer.dtype != given.dtype or answer.device != given.device:
        kind = f"{str(answer.dtype).removeprefix('torch.')} of shape {tuple(answer.shape)} on {answer.device}"
        raise HookError(f"the logits hook {name} returned {kind}; {wanted} on {given.device}")
    if bool((answer.isnan() | answer.isposinf()).any()):
        raise HookError(f"the logits hook {name} returned NaN or +inf; logits are finite, or -inf for what is not drawn")
    return answer.detach()


def _name(hook: object) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))
