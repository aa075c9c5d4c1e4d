"""Every kernel compiles ahead of time for every target, without a GPU, and spills no register from sm_80 up.

In a process of its own: kernels of this one are made for the interpreter.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import json, sys
from refimpl.kernels import spec
from refimpl.kernels.aot import compile_every

for done in compile_every(spec.every()):
    facts = {name: getattr(done, name) for name in ("kernel", "label", "target", "registers", "shared", "local", "spilled")}
    print(json.dumps(facts))
"""
SHARED_MEMORY = {75: 64, 80: 163, 89: 99, 90: 227, 100: 227}
"""kB that a program can have (NVIDIA, CUDA C++ Programming Guide, table of compute capabilities)."""


def test_every_kernel_compiles_for_every_target_and_spills_nothing():
    from refimpl.kernels import spec

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert [facts for facts in compiled if facts["spilled"]] == []
    assert [facts for facts in compiled if facts["shared"] > SHARED_MEMORY[facts["target"]] * 1024] == []
    assert [facts for facts in compiled if not 0 < facts["registers"] <= 255] == []
    reached = {(facts["kernel"], facts["target"]) for facts in compiled}
    for one in spec.every():
        for target in spec.TARGETS:
            assert ((one.name, target) in reached) is (target not in one.not_on), f"{one.name} on sm_{target}"
        assert all(why for why in one.not_on.values())
