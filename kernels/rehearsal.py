"""Compile kernels before they are needed, several at a time, by launches that compute nothing.

Triton compiles a kernel when it is first launched, and again for every dtype, alignment and constant that it has not seen. A
compilation takes a second or so, and launches come one after the other: of thirty kernels the last is ready half a minute
later. Most of that time Triton spends in LLVM and ptxas, where Python does other things. So the launches are rehearsed: who
rehearses calls what will be called, and each launch only hands its compilation to a pool of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from refimpl.kernels.attention_tiles import target_of
from refimpl.kernels.spec import every

MOST_THREADS = 32
_one_at_a_time = threading.Lock()


@contextmanager
def rehearsed(device: torch.device) -> Iterator[None]:
    """Within the block, this thread's launches of refimpl's kernels are compiled and not run; at its end all are ready.

    What a kernel would have written is left as it was: tensors hold whatever the memory held, so nothing in the block may
    use such a number as an index. Launches of other threads go on as ever. A kernel that cannot be compiled says so when it
    is launched in earnest.
    """
    from triton import AsyncCompileMode

    capability = target_of(device).capability
    listed = [spec for spec in every() if capability not in spec.not_on]
    kernels = {id(one.kernel): one.kernel for spec in listed for one in spec.compiles(capability)}.values()
    threads = max(1, min(MOST_THREADS, os.cpu_count() or 1))
    with _one_at_a_time, ThreadPoolExecutor(threads, thread_name_prefix="refimpl-compile") as pool:
        for kernel in kernels:
            kernel.run = _warming_up(kernel.run, threading.get_ident())
        try:
            with AsyncCompileMode(_Loading(pool, device), ignore_errors=True):
                yield
        finally:
            for kernel in kernels:
                del kernel.run  # what the class has is found again


def _warming_up(run: Callable[..., Any], thread: int) -> Callable[..., Any]:
    """A kernel's ``run`` that computes nothing for one of the threads."""

    def rehearsing(*args: Any, warmup: bool, **options: Any) -> Any:
        return run(*args, warmup=warmup or threading.get_ident() == thread, **options)

    return rehearsing


class _Loading:
    """An executor that also loads what it compiled onto the device: that compiles a launcher, by a C compiler."""

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device) -> None:
        self._pool, self._device = pool, device

    def submit(self, compile_one: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(self._compile_and_load, compile_one)

    def _compile_and_load(self, compile_one: Callable[[], Any]) -> Any:
        kernel = compile_one()
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                kernel.run  # noqa: B018 - asking for it loads the kernel
        return kernel
