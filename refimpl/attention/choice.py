"""Which attention backend serves an engine, and why; what a name cannot do here is refused in a sentence."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from refimpl.attention.backend import LEAST_FOR_PREFILL, AttentionBackend
from refimpl.attention.checked import CheckedBackend
from refimpl.attention.native_paged import NativePagedAttention
from refimpl.attention.torch_paged import TorchPagedAttention
from refimpl.errors import ConfigError
from refimpl.kernels import native
from refimpl.kernels.spec import TARGETS


@dataclass(frozen=True)
class Setting:
    """What a backend must suit."""

    head_dim: int
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    windowed: bool = False
    """Whether there are layers with a window (:attr:`ModelConfig.windowed`)."""

    @property
    def capability(self) -> int:
        """The GPU's compute capability as one number (90: an H100); 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        major, minor = torch.cuda.get_device_capability(self.device)
        return 10 * major + minor


class BackendChoice(NamedTuple):
    """The name of the backend that ``attention_backend`` comes to, and why."""

    name: str
    reason: str


def backend_choice(backend: Any, setting: Setting) -> BackendChoice:
    """What ``attention_backend`` (EngineArgs has checked it) comes to. Only a look: nothing is built or imported."""
    if not isinstance(backend, str):
        return BackendChoice(backend.name, "an object of your own")
    if backend != "auto":
        return BackendChoice(backend, "as asked for")
    if setting.device.type != "cuda":
        if native.obstacle_for(setting.dtype):
            return BackendChoice("torch", native.without(setting.dtype))
        return BackendChoice("native", native.WHY)
    obstacle = triton_obstacle(setting)
    if obstacle:
        return BackendChoice("torch", obstacle)
    if setting.capability < LEAST_FOR_PREFILL:
        return BackendChoice(
            "triton", f"sm_{setting.capability}: decodes by vector arithmetic, prefills by torch on gathered pages"
        )
    return BackendChoice("triton", f"sm_{setting.capability}: decodes by paged_attention, prefills by flash_attention")


def triton_obstacle(setting: Setting) -> str:
    """Why the Triton kernels cannot serve a setting; empty where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (torch's CUDA builds bring it)"
    if setting.device.type != "cuda":
        import triton

        if not triton.knobs.runtime.interpret:
            return "the device is a CPU: set TRITON_INTERPRET=1 before Python starts to have kernels interpreted, slowly"
    elif setting.capability < TARGETS[0]:
        return f"the kernels are made for sm_{TARGETS[0]} and later, and this is sm_{setting.capability}"
    elif setting.dtype == torch.float32:
        return "the kernels are laid out for 16 bits, which tensor cores multiply; float32 finds no room in the registers"
    if setting.dtype == torch.float64:
        return "the kernels compute in bfloat16, float16 and float32, not in float64"
    if setting.block_size & (setting.block_size - 1):
        return f"the kernels read blocks of powers of two, and block_size is {setting.block_size}"
    if setting.head_dim > 256:
        return f"the kernels hold heads of up to 256 numbers, and head_dim is {setting.head_dim}"
    return ""


def choose_backend(backend: Any, setting: Setting) -> AttentionBackend:
    """The backend of ``attention_backend`` (EngineArgs has checked it): a name, scaling scores by ``head_dim ** -0.5``, or
    an object of the user's, whose answers are checked.

    Raises:
        ConfigError: what is asked for by name cannot serve the setting; it says what to do instead.

    """
    if not isinstance(backend, str):
        if setting.windowed and not getattr(backend, "serves_windows", False):
            raise ConfigError(
                f"the attention backend {backend.name!r} does not say that it serves windows, and in some of the model's "
                "layers tokens attend to the last ones only: give it serves_windows = True and let attend(layer_kv, query, "
                "window) take one, lower max_model_len to the window, or use attention_backend='auto'"
            )
        return CheckedBackend(backend)
    name = backend_choice(backend, setting).name
    if name == "flash_attn":
        from refimpl.attention.flash import FlashAttention

        if setting.device.type != "cuda":
            raise ConfigError("attention_backend is 'flash_attn', which needs a GPU; the device is a CPU: use 'torch'")
        return FlashAttention(setting.head_dim, setting.dtype, setting.block_size, setting.capability)
    if name == "triton":
        obstacle = triton_obstacle(setting)
        slow = setting.device.type == "cuda" and setting.dtype == torch.float32  # asked for, it is done
        if obstacle and not slow:
            raise ConfigError(f"attention_backend is 'triton', but {obstacle}; or use attention_backend='torch'")
        from refimpl.attention.triton_paged import TritonPagedAttention

        return TritonPagedAttention(setting.head_dim**-0.5, setting.device)
    if name == "native":
        missing = (
            native.obstacle_for(setting.dtype) if setting.device.type == "cpu" else "it is a CPU's, and the device is a GPU"
        )
        if missing:
            raise ConfigError(f"attention_backend is 'native', but {missing}; use attention_backend='auto'")
        return NativePagedAttention(softmax_scale=setting.head_dim**-0.5)
    return TorchPagedAttention(softmax_scale=setting.head_dim**-0.5)
