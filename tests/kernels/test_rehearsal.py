"""Launches that are rehearsed compile their kernels and compute nothing; of another thread they go on."""

import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent(
    """
    import os, sys, tempfile, threading
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    launched = []

    class Utils:
        def load_binary(self, *_):
            return 0, 0, 32, 0, 1024

        def get_device_properties(self, _):
            return {"max_shared_mem": 232448}

    class Launcher:
        def __init__(self, src, _):
            self.name = src.fn.fn.__name__

        def __call__(self, *_):
            launched.append(self.name)

    class NoGpu:
        utils, launcher_cls = Utils(), Launcher
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda _=0: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    driver.set_active(NoGpu())
    from refimpl.bench.compilations import counted
    from refimpl.kernels.rehearsal import rehearsed
    from refimpl.kernels.silu_mul import silu_mul

    def launch(dtype):
        silu_mul(torch.zeros(3, 64, dtype=dtype))

    with counted() as found:
        with rehearsed(torch.device("cpu")):
            launch(torch.float16)
            launch(torch.bfloat16)
            launch(torch.bfloat16)
            assert not launched, launched
            other = threading.Thread(target=launch, args=(torch.float32,))
            other.start()
            other.join()
            assert len(launched) == 1, "another thread's launch is one"
        assert found.compiled == 3, found
        launch(torch.float16)
        launch(torch.bfloat16)
    assert found.compiled == 3, "all were ready"
    assert len(launched) == 3, launched
    print("all as said")
    """
)


def test_a_rehearsal_compiles_and_computes_nothing():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=280)
    assert ended.stdout == "all as said\n", ended.stderr[-2000:]
