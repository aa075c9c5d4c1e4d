"""Where kernels run in tests: on the GPU where there is one, else by Triton's interpreter (set in tests/conftest.py)."""

import pytest
import torch

triton = pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
assert triton.knobs.runtime.interpret is not ON_GPU


def round_as_a_gpu_does():
    """Have Triton's interpreter round float32 to e4m3 to the nearest: its own loses the carry (127.9 becomes 64)."""
    from triton.runtime import interpreter

    theirs = interpreter._convert_float

    def convert(values, source, target, rounding_mode):
        if (source, target) == (triton.language.float32, triton.language.float8e4nv):
            return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return theirs(values, source, target, rounding_mode)

    interpreter._convert_float = convert


if not ON_GPU:
    round_as_a_gpu_does()
