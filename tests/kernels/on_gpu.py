"""Every kernel of the registry on this machine's GPU, compiled, on small and served shapes, beside its twin in float64.

``python tests/kernels/on_gpu.py [KERNEL …]`` needs no pytest, and refimpl on PYTHONPATH; exit code 1 if anything is wrong.
"""

# ruff: noqa: T201, a command prints

import sys
import time

import torch
from compare import complaints

from refimpl.kernels import spec as registry


def main(names):
    device, bad = torch.device("cuda"), 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for spec in map(registry.get, names or registry.names()):
        start, count, wrong = time.perf_counter(), 0, 0
        for shape in (*spec.small_shapes, *spec.device_shapes):
            for dtype in spec.tolerance:
                try:
                    found = complaints(spec, shape, dtype, device)
                except Exception as error:  # one kernel's failure hides no other's
                    found = [f"{type(error).__name__}: {str(error)[-500:]}"]
                count, wrong = count + 1, wrong + bool(found)
                for sentence in found[:3]:
                    print(f"    {spec.name} {dict(shape)} {dtype}: {sentence}")
            torch.cuda.empty_cache()
        print(f"{spec.name:<22} {count - wrong} of {count} right, {time.perf_counter() - start:.1f} s", flush=True)
        bad += wrong
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
