"""Where kernels run in tests: on the GPU where there is one, else by Triton's interpreter (set in tests/conftest.py)."""

import pytest
import torch

triton = pytest.importorskip("triton")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
assert triton.knobs.runtime.interpret is not ON_GPU
