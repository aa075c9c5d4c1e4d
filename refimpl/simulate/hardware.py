"""What the simulator knows of hardware: memory, bandwidth, rates, links and prices of one device, from public figures.

Bandwidths and rates are the vendor's peaks, rates dense (half of what data sheets print "with sparsity") and with float32
accumulation; how much of a peak is reached is :class:`refimpl.simulate.roofline.Efficiency`'s business. Sources, by device,
with the month of its announcement; figures were looked up on 2026-11-30, in reviews and shops that copy the sheets' tables
(all but the 4,000 GB/s of the GH200 were found):

- a100-40g, a100-80g: NVIDIA A100 data sheet (SXM4; 1758950, revision 4; 2020-05): 1,555 and 2,039 GB/s, 312 TFLOP/s, NVLink
  600 GB/s both ways together.
- h100: NVIDIA H100 data sheet (SXM5, 2022-03): 3,350 GB/s, 989 TFLOP/s (1,979 sparse), FP8 1,979 (3,958 sparse), NVLink 900
  GB/s.
- h200: NVIDIA H200 data sheet (SXM5, 2023-11): 4,800 GB/s, rates and NVLink of the H100.
- gh200: NVIDIA GH200 data sheet (96 GB of HBM3, 2023-05): 4,000 GB/s, rates and NVLink of the H100.
- l4: NVIDIA L4 data sheet (2023-03): 300 GB/s, 121 TFLOP/s (242 sparse), FP8 242 (485 sparse), PCIe 4.0 x16 (64 GB/s both
  ways together).
- l40s: NVIDIA L40S data sheet (2023-08): 864 GB/s, 362.05 TFLOP/s, FP8 733 (1,466 sparse), PCIe 4.0 x16.
- t4: NVIDIA T4 data sheet (2018-09): 320 GB/s, 65 TFLOP/s (float16; it has no bfloat16), PCIe 3.0 x16 (32 GB/s).
- rtx-4090: NVIDIA Ada GPU architecture white paper, appendix A (2022-09): 1,008 GB/s, 165.2 TFLOP/s, FP8 330.3, PCIe 4.0
  x16.
- cpu: arithmetic for a server socket: 8 channels of DDR5-4800 are 8 · 4,800 · 8 B = 307.2 GB/s; 32 cores of 1,024 bfloat16
  operations a cycle (AMX) at 2 GHz are 65.5 TFLOP/s. No links.

Memory is what the driver reports, not what the name says (``nvidia-smi``, MiB; A100, H100, L4, L40S and T4 as listed by
thundergolfer.com/blog/nvidia-gpu-memory-capacity). The H200's is what CUDA could use on one, 139.8 GiB; the driver says
140.4. For GH200 and RTX 4090 no such list was found.

The way to host memory, which swapping takes, one way: 32 GB/s over PCIe 4.0 x16 (A100, L4, L40S, RTX 4090; 64 both ways in
their data sheets), 64 over PCIe 5.0 x16 (H100, H200; 128 both ways), 16 over PCIe 3.0 x16 (T4), and 450 over NVLink-C2C
(GH200; 900 both ways). On a CPU a copy reads and writes the same memory: half its bandwidth.

A link's latency is that of one all-reduce of a small message: about 8 µs over NVLink (measured between two H200s, 7 to 10),
about 20 µs over PCIe (assumed).

Prices are assumptions, no vendor's figures: US dollars for one device and hour, on demand. Those of a100-80g, h100 and h200
are the middle of what specialised clouds asked in May 2026 (1.10 to 1.50, 2.50 to 3.50, 3.50 to 4.50;
mercatus-ai.com/blog/cloud-gpu-pricing), the others list prices of the sellers and years named beside them. Prices differ
threefold between sellers: take them for the order of size, and give your own (``price``, ``--price``).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from refimpl.errors import ConfigError

MIB, GB, TERA = 1024**2, 1e9, 1e12
NVLINK_LATENCY, PCIE_LATENCY = 8e-6, 20e-6

T = TypeVar("T")


@dataclass(frozen=True)
class Hardware:
    """One device of a kind."""

    name: str
    memory_bytes: int
    bandwidth: float
    """Bytes a second between the device's memory and its units, at peak."""
    flops: float
    """Operations a second in 16 bits, dense, at peak."""
    fp8_flops: float | None
    """The same in FP8; None where there are no such units: then 8-bit weights are widened, and computed in 16 bits."""
    link_bandwidth: float
    """Bytes a second to the other devices, one way."""
    link_latency: float
    """Seconds of an all-reduce of next to nothing."""
    host_bandwidth: float
    """Bytes a second to or from the host's memory, one way, at peak."""
    price: float
    """US dollars an hour, assumed."""
    price_source: str
    """Whose price is assumed, and when it was."""


def _mib(count: int) -> int:
    return count * MIB


PCIE_3, PCIE_4, PCIE_5, NVLINK_C2C = 16 * GB, 32 * GB, 64 * GB, 450 * GB
"""Of 16 lanes, one way."""

_MAY_2026 = "specialised clouds, 2026-05"
_H100 = (989 * TERA, 1_979 * TERA, 450 * GB, NVLINK_LATENCY)
_PCIE = (32 * GB, PCIE_LATENCY, PCIE_4)
HARDWARE = {
    device.name: device
    for device in (
        Hardware(
            *("a100-40g", _mib(40_960), 1_555 * GB, 312 * TERA, None, 300 * GB, NVLINK_LATENCY, PCIE_4),
            *(1.29, "Lambda, 2025"),
        ),
        Hardware(
            *("a100-80g", _mib(81_920), 2_039 * GB, 312 * TERA, None, 300 * GB, NVLINK_LATENCY, PCIE_4),
            *(1.30, _MAY_2026),
        ),
        Hardware("h100", _mib(81_559), 3_350 * GB, *_H100, PCIE_5, 3.00, _MAY_2026),
        Hardware("h200", _mib(143_155), 4_800 * GB, *_H100, PCIE_5, 4.00, _MAY_2026),
        Hardware("gh200", _mib(97_871), 4_000 * GB, *_H100, NVLINK_C2C, 1.49, "Lambda, 2025"),
        Hardware("l4", _mib(23_034), 300 * GB, 121 * TERA, 242 * TERA, *_PCIE, 0.71, "Google Cloud, 2025"),
        Hardware("l40s", _mib(46_068), 864 * GB, 362 * TERA, 733 * TERA, *_PCIE, 0.86, "RunPod, 2025"),
        Hardware("t4", _mib(15_360), 320 * GB, 65 * TERA, None, 16 * GB, PCIE_LATENCY, PCIE_3, 0.35, "Google Cloud, 2025"),
        Hardware("rtx-4090", _mib(24_564), 1_008 * GB, 165.2 * TERA, 330.3 * TERA, *_PCIE, 0.69, "RunPod, 2026"),
        Hardware(
            *("cpu", _mib(65_536), 307.2 * GB, 65.5 * TERA, None, 32 * GB, PCIE_LATENCY, 307.2 / 2 * GB),
            *(1.50, "assumed, 32 cores"),
        ),
    )
}
"""By name."""


def find_hardware(name: str) -> Hardware:
    """The device of a name.

    Raises:
        ConfigError: there is none; the nearest names are named.

    """
    return nearest(name, HARDWARE, "hardware")


def nearest(name: str, known: Mapping[str, T], what: str) -> T:
    """An entry by its name, small and capital letters alike.

    Raises:
        ConfigError: there is none; the nearest names are named.

    """
    if (found := known.get(name.lower())) is not None:
        return found
    near = [k for k in known if k.startswith(name.lower())] or difflib.get_close_matches(
        name.lower(), known, n=2, cutoff=0.4
    )
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(f"{what} {name!r} is not known; {hint}There are {', '.join(known)}")
