"""Every registered kernel against its twin in float64: by Triton's interpreter here, on a GPU where there is one.

On a machine with a GPU ``pytest tests/kernels/test_specs.py`` runs the same tests compiled, on the shapes that are served
too. Compiling ahead of time is tested in test_aot.py.
"""

import pytest
import torch
from kernel_device import DEVICE, ON_GPU

from refimpl.kernels import spec as registry

SPECS = registry.every()


def cases():
    for spec in SPECS:
        shapes = [*spec.small_shapes, *(spec.device_shapes if ON_GPU else ())]
        for shape in shapes:
            for dtype in spec.tolerance:
                label = "-".join(f"{axis}{size}" for axis, size in shape.items())
                yield pytest.param(spec, shape, dtype, id=f"{spec.name}-{label}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("spec", "shape", "dtype"), list(cases()))
def test_kernel_is_its_twin(spec, shape, dtype):
    case = spec.make_case(shape, dtype, DEVICE, 0)
    expected = spec.oracle(case)
    got = spec.named(spec.launch(**case.inputs, **case.out))
    assert wrong(spec, case, dtype, got, expected) == []


def wrong(spec, case, dtype, got, expected):
    if spec.complain:
        return spec.complain(case, got, expected)
    tolerance = spec.tolerance[dtype]
    # The interpreter cuts float32 off to bfloat16 where a GPU rounds, which is up to twice as far.
    looser = 2 if dtype == torch.bfloat16 and not ON_GPU else 1
    found = []
    for name, value in got.items():
        assert value.shape == expected[name].shape, f"{name} is {tuple(value.shape)}, not {tuple(expected[name].shape)}"
        if value.dtype.is_floating_point:
            found += distance(name, value, expected[name], looser * tolerance.rtol, looser * tolerance.atol)
        elif not torch.equal(value, expected[name]):
            found.append(f"{name} differs at {(value != expected[name]).nonzero()[:8].tolist()}")
    return found


def distance(name, got, expected, rtol, atol):
    got, expected = got.double(), expected.double()
    good = torch.isclose(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    places = (~good).nonzero()[:8].tolist()
    return [
        f"{name}{place}: got {got[tuple(place)].item():.9g}, expected {expected[tuple(place)].item():.9g} "
        f"± {atol:g} + {rtol:g}·|x|; {(~good).sum().item()} of {got.numel()} differ"
        for place in places
    ]
