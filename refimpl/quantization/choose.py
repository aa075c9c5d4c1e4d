"""Which method an option or a checkpoint names, which device can do it, and which model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from refimpl.errors import CheckpointError, ConfigError, UnsupportedModelError
from refimpl.kernels.spec import LEAST_FOR_FP8
from refimpl.model_config import ModelConfig
from refimpl.quantization.awq import Awq
from refimpl.quantization.awq_layout import GROUP_SIZES, check_groups
from refimpl.quantization.fp8 import Fp8
from refimpl.quantization.method import LinearMethod, weight_bytes
from refimpl.quantization.plain import PLAIN
from refimpl.quantization_config import CUT_BY_INPUTS, MATRICES


def choose_method(
    name: str | None,
    device: torch.device,
    model: ModelConfig | None = None,
    widens: Callable[[LinearMethod], bool] = lambda method: True,
    ranks: int = 1,
) -> LinearMethod:
    """The method of ``EngineArgs.quantization``, or of the checkpoint where that is quantised already.

    Args:
        name: the option.
        device: where the weights will be.
        model: what they are of; None where that is not known yet.
        widens: on a CPU, whether 4-bit weights are to be widened once, given the method that does.
        ranks: among which the matrices are shared out, some by their inputs.

    Raises:
        CheckpointError: groups of 4-bit weights do not divide a matrix of the model.
        ConfigError: the device has no arithmetic for it, or option and checkpoint name different methods; the message says
            what to do.
        UnsupportedModelError: the checkpoint leaves matrices in 16 bits that refimpl holds in one with others.

    """
    stored = None if model is None else model.quantization
    if stored is not None and name not in (None, stored.method):
        raise ConfigError(
            f"quantization is {name!r}, but the checkpoint's weights are quantised already, by {stored.title}: leave "
            f"quantization out, or use the model's 16-bit checkpoint"
        )
    chosen = name if stored is None else stored.method
    if chosen is None:
        return PLAIN
    if chosen == "fp8" and (refusal := why_not_fp8(device)):
        raise ConfigError(_refused_fp8(refusal, stored is not None))
    if model is not None:
        _check_left_out(model)
    if chosen == "fp8":
        return Fp8()
    group_size = -1 if stored is None else stored.group_size
    if model is not None:
        _check_groups(model, group_size, ranks)
    widened = Awq(group_size, chosen, widens=True)
    return widened if device.type == "cpu" and widens(widened) else Awq(group_size, chosen)


def methods_for(device: torch.device, model: ModelConfig) -> list[LinearMethod]:
    """Every method that would round a model's weights as they are loaded, on a device: the mildest first.

    On a CPU none but FP8 holds fewer bytes for long: weights of 4 bits are widened there, where memory allows.
    """
    found: list[LinearMethod] = []
    for name in ("fp8", "awq"):
        try:
            found.append(choose_method(name, device, model, widens=lambda method: False))
        except (ConfigError, CheckpointError):
            continue
    return found


def fits_widened(model: ModelConfig, dtype: torch.dtype, free: int) -> Callable[[LinearMethod], bool]:
    """``widens`` for so many free bytes of a CPU: whether the weights take half of them at most."""
    return lambda method: 2 * weight_bytes(model, method, dtype.itemsize) <= free


def why_not_fp8(device: torch.device) -> str:
    """Why a device cannot run FP8 weights; empty where it can. A CPU can, slowly."""
    if device.type != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor >= LEAST_FOR_FP8:
        return ""
    name = torch.cuda.get_device_name(device)
    return f"{name} (sm_{major}{minor}) has no FP8 arithmetic, which begins with sm_{LEAST_FOR_FP8}"


def _refused_fp8(refusal: str, stored: bool) -> str:
    if stored:
        return f"the checkpoint's weights are in FP8, but {refusal}; use the model's 16-bit checkpoint, or one of AWQ"
    return (
        f"quantization is 'fp8', but {refusal}; use quantization='awq', whose 4-bit weights run from sm_75 on, or leave "
        "quantization out and use dtype=bfloat16 or float16"
    )


def _check_left_out(model: ModelConfig) -> None:
    """See that what a checkpoint leaves in 16 bits are whole matrices, and none of FP8's layers."""
    stored = model.quantization
    if stored is None:
        return
    for layer, place, left in stored.left_matrices(model.num_hidden_layers):
        names = ", ".join(f"model.layers.{layer}.{part}" for part in left)
        if len(left) < len(MATRICES[place]):
            raise UnsupportedModelError(
                f"the checkpoint leaves {names} in 16 bits, but not the others of {', '.join(MATRICES[place])}, which "
                "refimpl holds in one matrix; use a checkpoint that treats them alike"
            )
        if stored.method == "fp8":
            raise UnsupportedModelError(
                f"the checkpoint leaves {names} in 16 bits, among layers of FP8, which refimpl does not run; use one that "
                "leaves out lm_head alone, or the 16-bit checkpoint with quantization=fp8"
            )


def _check_groups(model: ModelConfig, group_size: int, ranks: int) -> None:
    for parts, (_, inputs) in zip(MATRICES, model.layer_matrices, strict=True):
        layer, sharing = f"model.layers.0.{parts[0]}", ranks if parts[0] in CUT_BY_INPUTS else 1
        check_groups(layer, inputs, group_size, sharing)
        if group_size == -1 and inputs % (GROUP_SIZES[-1] * sharing):
            raise ConfigError(
                f"{layer} has {inputs} inputs; 4-bit weights need a multiple of {GROUP_SIZES[-1]}: use quantization=fp8, or "
                "weights in 16 bits"
            )
