"""Every kernel compiles ahead of time for every target, without a GPU, and spills no register from sm_80 up.

In a process of its own: kernels of this one are made for the interpreter.
"""

import json
import os
import subprocess
import sys

import kernel_device  # noqa: F401 - how kernels are to run is settled before one is defined
import pytest

from refimpl.kernels import spec as registry

COMPILE = """
import dataclasses, json
from refimpl.kernels import spec
from refimpl.kernels.aot import compile_every, compile_kernel

def tell(done, **more):
    names = ("kernel", "label", "target", "registers", "shared", "local", "spilled")
    uses = [word for word in ("wgmma", "cp.async.cg", "cp.async.bulk") if word in done.ptx]
    early, waits, _ = done.ptx.partition("griddepcontrol.wait")
    overlaps = {"waits": bool(waits), "early_stores": early.count("st.global") if waits else 0}
    print(json.dumps({name: getattr(done, name) for name in names} | {"uses": uses} | overlaps | more))

for done in compile_every(spec.every()):
    tell(done, ones=False)

firsts = {one.kernel: (one, each.name) for each in spec.every() for one in each.compiles(90)}
for one, name in firsts.values():
    integers = [argument for argument, kind in one.signature.items() if kind == "i32"]
    signature = {argument: kind for argument, kind in one.signature.items() if kind != "i32"}
    constexprs = one.constexprs | dict.fromkeys(integers, 1)
    done = compile_kernel(dataclasses.replace(one, signature=signature, constexprs=constexprs), 90, name)
    tell(done, ones=one.kernel.__name__)
"""
pytestmark = pytest.mark.timeout(900)  # a minute or two alone; the machine may be shared
SHARED_MEMORY = {75: 64, 80: 163, 89: 99, 90: 227, 100: 227}
"""kB that a program can have (NVIDIA, CUDA C++ Programming Guide, table of compute capabilities)."""


@pytest.fixture(scope="module")
def compiled():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_compiles_for_every_target_and_spills_nothing(compiled):
    served = [facts for facts in compiled if not facts["ones"]]
    assert [facts for facts in served if facts["spilled"]] == []
    assert [facts for facts in served if facts["shared"] > SHARED_MEMORY[facts["target"]] * 1024] == []
    assert [facts for facts in served if not 0 < facts["registers"] <= 255] == []
    reached = {(facts["kernel"], facts["target"]) for facts in served}
    for one in registry.every():
        for target in registry.TARGETS:
            assert ((one.name, target) in reached) is (target not in one.not_on), f"{one.name} on sm_{target}"
        assert all(why for why in one.not_on.values())


def test_prefill_on_hopper_has_asynchronous_products_and_copies_and_no_bulk_copy(compiled):
    """Notebook 05 says so, beside what FlashAttention-3 does."""
    served = [facts for facts in compiled if not facts["ones"]]
    found = [facts["uses"] for facts in served if (facts["kernel"], facts["target"]) == ("flash_attention", 90)]
    assert found
    assert all(uses == ["wgmma", "cp.async.cg"] for uses in found)


def test_kernels_of_a_decode_step_overlap_from_hopper_up_and_write_nothing_before_they_wait(compiled):
    norms, products = {"rms_norm", "add_rms_norm"}, {"linear", "gated_linear", "silu_mul"}
    step = norms | products | {"write_kv", "turn_and_write_kv", "paged_attention"}
    for facts in compiled:
        if facts["kernel"] in step and facts["label"] != "plan" and not facts["ones"]:
            assert facts["waits"] is (facts["target"] >= 90), (facts["kernel"], facts["label"], facts["target"])
        assert facts["early_stores"] == 0, (facts["kernel"], facts["label"])


def test_kernels_compile_where_an_integer_is_one(compiled):
    """Triton compiles an integer argument of 1 in, as a constant; what a tensor can do, a constant cannot always."""
    kernels = {one.kernel.__name__ for spec in registry.every() for one in spec.compiles(90)}
    assert {facts["ones"] for facts in compiled if facts["ones"]} == kernels
