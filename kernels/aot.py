"""Compile every kernel ahead of time for every target, without a GPU: ``python -m refimpl.kernels.aot [KERNEL …]``.

What is told of each: registers a thread, bytes of shared memory a program, and bytes a thread in local memory, where what
finds no register is spilled to; from sm_80 up that should be none. The figures are those of ``cuobjdump`` on the compiled
binary; both come with triton.
``TRITON_INTERPRET`` must not be set: a function that is made for the interpreter cannot be compiled.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from refimpl.errors import ConfigError, RefimplError
from refimpl.kernels import spec as registry
from refimpl.kernels.spec import TARGETS, Compile, KernelSpec

PIECES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
ROW = "{:<22} {:<30} {:>6} {:>6} {:>5} {:>9} {:>7}"


@dataclass(frozen=True)
class Compiled:
    """What one compilation came to."""

    kernel: str
    label: str
    target: int
    registers: int
    """A thread's."""
    shared: int
    """Bytes a program."""
    local: int
    """Bytes a thread has in local memory, where what finds no register is spilled to."""
    num_warps: int
    may_spill: bool
    ptx: str
    ttir: str

    @property
    def spilled(self) -> bool:
        """Whether it holds registers in memory, on a target where none should."""
        return self.local > 0 and self.target >= 80 and not self.may_spill


def compile_kernel(one: Compile, target: int, name: str) -> Compiled:
    """Compile one kernel for a compute capability (75, 80, …).

    Raises:
        ConfigError: the process was told to interpret kernels.

    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise ConfigError("TRITON_INTERPRET is set, so kernels are not compiled; unset it")
    # Triton 3.9 asks that this is said; contracting a·b + c into one instruction is what a launch does by default.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    arguments = one.kernel.arg_names
    signature = {argument: one.signature.get(argument, "constexpr") for argument in arguments}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(arguments)
        if argument not in one.unaligned and signature[argument][0] in "*i"
    }
    source = ASTSource(fn=one.kernel, signature=signature, constexprs=one.constexprs, attrs=aligned)
    options: dict[str, int | None] = {
        "num_warps": one.num_warps,
        "num_stages": one.num_stages,
        "enable_fp_fusion": one.fp_fusion,
    }
    options["maxnreg"] = one.max_registers
    kernel = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    registers, local = _resources(kernel.asm["cubin"])
    return Compiled(
        kernel=name,
        label=one.label,
        target=target,
        registers=registers,
        shared=kernel.metadata.shared,
        local=local,
        num_warps=one.num_warps,
        may_spill=one.may_spill,
        ptx=kernel.asm["ptx"],
        ttir=kernel.asm["ttir"],
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of the one kernel in a binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = PIECES.search(told)
    if found is None:
        raise RefimplError(f"cuobjdump told nothing that is understood: {told[:200]}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def compile_every(specs: Iterable[KernelSpec], targets: Iterable[int] = TARGETS) -> Iterator[Compiled]:
    """Compile kernels for targets; those that a kernel is not for are left out."""
    targets = tuple(targets)
    for spec in specs:
        for target in targets:
            if target not in spec.not_on:
                for one in spec.compiles(target):
                    yield compile_kernel(one, target, spec.name)


def main(names: list[str]) -> int:
    """Print the table of the named kernels, or of all; 1 if something spilled that must not."""
    specs = [registry.get(name) for name in names or registry.names()]
    tell = sys.stdout.write
    tell(ROW.format("kernel", "compiled with", "target", "warps", "regs", "shared B", "local B") + "\n")
    spilled = 0
    for spec in specs:
        for done in compile_every([spec]):
            figures = (f"sm_{done.target}", done.num_warps, done.registers, done.shared, done.local)
            tell(ROW.format(done.kernel, done.label, *figures) + (" spilled\n" if done.spilled else "\n"))
            spilled += done.spilled
        for target, why in sorted(spec.not_on.items()):
            tell(f"{spec.name:<22} not for sm_{target}: {why}\n")
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
