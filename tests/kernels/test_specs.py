"""Every registered kernel against its twin in float64: by Triton's interpreter here, on a GPU where there is one.

On a machine with a GPU they run compiled, on the shapes that are served too. Compiling ahead of time: test_aot.py.
"""

import pytest
from compare import complaints
from kernel_device import DEVICE, ON_GPU

from refimpl.kernels import spec as registry


def cases():
    for spec in registry.every():
        for shape in (*spec.small_shapes, *(spec.device_shapes if ON_GPU else ())):
            for dtype in spec.tolerance:
                label = "-".join(f"{axis}{size}" for axis, size in shape.items())
                yield pytest.param(spec, shape, dtype, id=f"{spec.name}-{label}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("spec", "shape", "dtype"), list(cases()))
def test_kernel_is_its_twin(spec, shape, dtype):
    assert complaints(spec, shape, dtype, DEVICE) == []
