"""Operations for a CPU in C++ (``between_products.cpp``), compiled on the machine on which they run.

Where there is a compiler, the first process takes about a second for it and keeps what it made in the user's cache folder,
by a hash of the source and of this CPU's flags; where nothing can be kept, each process makes its own. Where there is no
compiler, :func:`library` is None, :func:`obstacle` says why, and torch's operations do the same. ``REFIMPL_NATIVE=0`` leaves
the compiler alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from refimpl.cache_folder import cache_folder
from refimpl.errors import ConfigError

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
        return _loaded(compiler), ""
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.decode(errors="replace").splitlines() if "error" in line]
        why = said[0] if said else f"it ended with code {error.returncode}"
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    return None, f"{compiler} did not make a library that loads here: {why}"


def _loaded(compiler: str) -> ctypes.CDLL:
    """The library that is kept; else one made now, and kept where there is a folder for it."""
    folder = _writable_folder()
    kept = None if folder is None else folder / f"between_products-{_key(compiler)}.so"
    if kept is not None and kept.exists():
        with suppress(OSError):  # a file that does not load, as a disk that was full leaves it, is made anew
            return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / "made.so"
        # Not linked to a library of threads: the names in it are found in the one that torch has loaded.
        command = [compiler, *FLAGS, "-shared", str(SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, timeout=5 * MINUTE)
        library = ctypes.CDLL(str(made))
        if kept is not None:
            os.replace(made, kept)
    return library


def _writable_folder() -> Path | None:
    """Where libraries are kept; None where nothing can be, as in a container whose files are for reading."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError):
        return None
    return folder if os.access(folder, os.W_OK) else None


def _key(compiler: str) -> str:
    """What a library depends on: with a home that machines share, each kind of them finds its own."""
    about, cpu = Path("/proc/cpuinfo"), ""
    if about.exists():  # x86 tells flags; ARM features, and by numbers whose core it is
        told = (line for line in about.read_text().splitlines() if line.startswith(("flags", "Features", "CPU ")))
        cpu = "\n".join(sorted(set(told)))
    parts = (SOURCE.read_text(encoding="utf-8"), *FLAGS, compiler, platform.machine(), cpu, torch.__version__)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
