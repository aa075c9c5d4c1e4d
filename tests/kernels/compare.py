"""A kernel's outputs beside its twin's in float64; needs no pytest."""

import torch

ON_GPU = torch.cuda.is_available()


def complaints(spec, shape, dtype, device):
    """What is wrong with a kernel at one shape and dtype: a list of sentences, empty where it is right."""
    case = spec.make_case(shape, dtype, device, 0)
    expected = spec.oracle(case)
    got = spec.named(spec.launch(**case.inputs, **case.out))
    for name, value in got.items():
        if value.shape != expected[name].shape:
            return [f"{name} is {tuple(value.shape)}, not {tuple(expected[name].shape)}"]
    if spec.complain:
        return spec.complain(case, got, expected)
    tolerance = spec.tolerance[dtype]
    # The interpreter cuts float32 off to bfloat16 where a GPU rounds, which is up to twice as far.
    looser = 2 if dtype == torch.bfloat16 and not ON_GPU else 1
    found = []
    for name, value in got.items():
        if value.dtype.is_floating_point:
            found += distance(name, value, expected[name], looser * tolerance.rtol, looser * tolerance.atol)
        elif not torch.equal(value, expected[name]):
            found.append(f"{name} differs at {(value != expected[name]).nonzero()[:8].tolist()}")
    return found


def distance(name, got, expected, rtol, atol):
    """The first places where numbers are too far apart. NaN must stand where it is expected, and nowhere else."""
    got, expected = got.double(), expected.double()
    good = torch.isclose(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    return [
        f"{name}{place}: got {got[tuple(place)].item():.9g}, expected {expected[tuple(place)].item():.9g} "
        f"± {atol:g} + {rtol:g}·|x|; {(~good).sum().item()} of {got.numel()} differ"
        for place in (~good).nonzero()[:8].tolist()
    ]
