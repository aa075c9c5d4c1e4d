"""The registry of kernels: complete, lazy, and what the cases of its tests are made of."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_device import DEVICE

from refimpl import kernels
from refimpl.errors import ConfigError
from refimpl.kernels import cases
from refimpl.kernels import spec as registry

SPECS = registry.every()


def test_names_are_listed_without_triton():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from refimpl.errors import ConfigError\n"
        "from refimpl.kernels import spec, reference, philox, cases, launch\n"
        "print(len(spec.names()))\n"
        "try: spec.get('rms_norm')\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    count, message = done.stdout.splitlines()
    assert int(count) == len(SPECS)
    assert message.startswith("kernels need triton: pip install triton")


def test_an_unknown_kernel_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match=r"there is no kernel 'gelu'; there are add_rms_norm, "):
        registry.get("gelu")


def test_homes_and_files_say_the_same():
    for home in set(registry.HOMES.values()):
        assert {spec.name for spec in registry.in_file(home)} == {n for n, file in registry.HOMES.items() if file == home}


def jitted(path):
    """Names of the functions of a file that stand under ``@triton.jit`` and that a launcher starts: ``…_kernel``."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list):
            yield node.name


def test_every_kernel_is_registered():
    """What is launched is compiled ahead of time for some target, so that nothing goes untested."""
    [folder] = kernels.__path__
    launched = {name for path in Path(folder).glob("*.py") for name in jitted(path) if name.endswith("_kernel")}
    compiled = {one.kernel.__name__ for spec in SPECS for target in registry.TARGETS for one in spec.compiles(target)}
    assert launched == compiled


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_spec_is_whole(spec):
    assert spec.summary
    assert spec.small_shapes
    assert spec.device_shapes
    for shape in (*spec.small_shapes, *spec.device_shapes):
        assert set(shape) <= set(spec.axes)
        for dtype in spec.tolerance:
            assert spec.bytes_moved(shape, dtype) >= 0
            assert spec.flops(shape, dtype) >= 0
    assert all(tolerance.why for tolerance in spec.tolerance.values())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_twin_changes_nothing_and_cases_repeat(spec):
    shape, dtype = spec.small_shapes[2], next(iter(spec.tolerance))
    case, again = (spec.make_case(shape, dtype, DEVICE, 3) for _ in range(2))
    outputs = spec.named(spec.twin(**case.inputs))
    for name, value in case.inputs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, again.inputs[name], rtol=0, atol=0, equal_nan=True, msg=name)
    assert all(isinstance(output, torch.Tensor) for output in outputs.values())


def test_poisoned_memory_is_nan_and_far_blocks_lie_beyond_32_bits():
    pool = cases.poisoned_pool(4, 2, 1, 4, torch.bfloat16, torch.device("cpu"), block_gap=2**30)
    assert pool.isnan().all()
    assert 3 * pool.stride(0) > 2**31
    spaced = cases.spaced(torch.ones(2, 3), 2)
    assert spaced.stride() == (5, 1)
    assert torch.as_strided(spaced, (2, 5), (5, 1))[:, 3:].isnan().all()
