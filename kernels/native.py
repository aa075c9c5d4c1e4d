"""Operations for a CPU in C++ (``between_products.cpp``), compiled on the machine on which they run.

Where there is a compiler, the first process takes about a second for it and keeps what it made in the user's cache folder,
by a hash of the source and of this CPU's flags. Where there is none, :func:`library` is None, :func:`obstacle` says why, and
torch's operations do the same. ``REFIMPL_NATIVE=0`` leaves the compiler alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("between_products.cpp")
FLAGS = (
    "-O3", "-march=native", "-fPIC", "-std=c++17",
    # Sums in any order, as vectors take them; NaN and infinity keep their meaning.
    "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno",
)  # fmt: skip
MINUTE = 60
WHY = "compiled on this machine by its C++ compiler"
SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def by_native(*tensors: Tensor) -> bool:
    """Whether tensors are where these operations serve: on a CPU, whole, in float32 or bfloat16; and there is a library.

    They have no backward pass: what is trained is plain torch. So is what a ``TorchDispatchMode`` watches, a counter of
    floating-point operations for one, which would see nothing of them.
    """
    if torch._C._len_torch_dispatch_stack():
        return False
    here = all(x.device.type == "cpu" and x.dtype in SUFFIXES and x.is_contiguous() and not x.requires_grad for x in tensors)
    return here and library() is not None


def function(name: str, dtype: torch.dtype) -> ctypes._NamedFuncPointer:
    """One of the library's functions. Its whole numbers are of 64 bits, its arrays addresses."""
    made = library()
    assert made is not None, "who calls has asked by_native"
    return _typed(f"{name}_{SUFFIXES[dtype]}")


@functools.cache
def _typed(name: str) -> ctypes._NamedFuncPointer:
    whole, real = ctypes.c_int64, ctypes.c_float
    kinds: dict[str, tuple[type[ctypes._SimpleCData[int]] | type[ctypes._SimpleCData[float]], ...]] = {
        "add_rms_norm": (*[whole] * 6, real, whole),
        "silu_mul": (whole,) * 5,
        "turn_and_write": (whole,) * 15,
        "attend_rows": (*[whole] * 6, real, *[whole] * 13),
    }
    found: ctypes._NamedFuncPointer = getattr(library(), name)
    found.argtypes, found.restype = kinds[name.rsplit("_", 1)[0]], None
    return found


def library() -> ctypes.CDLL | None:
    """The compiled operations, or None."""
    return _made()[0]


def obstacle() -> str:
    """Why there is no library; empty where there is one."""
    return _made()[1]


def obstacle_for(dtype: torch.dtype) -> str:
    """Why operations in a dtype are torch's on a CPU; empty where they are the library's."""
    return obstacle() if dtype in SUFFIXES else f"the compiled operations know {' and '.join(SUFFIXES.values())}"


def without(dtype: torch.dtype) -> str:
    """What is told of a CPU whose operations are torch's."""
    return f"on a CPU, and {obstacle_for(dtype)}"


@functools.cache
def _made() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("REFIMPL_NATIVE") == "0":
        return None, "REFIMPL_NATIVE is 0"
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None, "there is no C++ compiler"
    try:
        return ctypes.CDLL(str(_compiled(compiler))), ""
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"{compiler} did not make a library that loads here: {error}"


def _compiled(compiler: str) -> Path:
    """The library's file, made if it is not there yet."""
    cpu = Path("/proc/cpuinfo")
    flags = next((line for line in cpu.read_text().splitlines() if line.startswith("flags")), "") if cpu.exists() else ""
    key = hashlib.sha256("\n".join((SOURCE.read_text(), *FLAGS, compiler, flags, torch.__version__)).encode()).hexdigest()
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("REFIMPL_CACHE") or caches / "refimpl").expanduser()
    target = folder / f"between_products-{key[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            compiled, linked = Path(made) / "made.o", Path(made) / "made.so"
            # Linked without a library of threads: its names are found in the one that torch has loaded, so that there is
            # one pool of threads, not two that keep each other from the cores.
            for command in (
                [*FLAGS, "-fopenmp", "-c", str(SOURCE), "-o", str(compiled)],
                ["-shared", str(compiled), "-o", str(linked)],
            ):
                subprocess.run([compiler, *command], check=True, capture_output=True, timeout=5 * MINUTE)
            os.replace(linked, target)
    return target
