"""The benchmark of kernels: its arithmetic, with a clock and a cache in place of the GPU's, and what it says without one."""

import pytest
import torch
from kernel_device import DEVICE, ON_GPU
from typer.testing import CliRunner

from refimpl.bench import kernels, offline, report
from refimpl.bench.commands import bench
from refimpl.bench.result import Result, check
from refimpl.errors import ConfigError
from refimpl.kernels import spec as registry

CEILINGS = {
    "read_bytes_per_second": 4e12,
    "copy_bytes_per_second": 3e12,
    "bytes_per_second": 4e12,
    "flops_per_second": 1e15,
    "launch_microseconds": 1.5,
}


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(ConfigError, match=r"bench kernels needs a GPU, and torch .* sees none here"):
        kernels.run()


def test_share_is_the_bound_over_the_time(monkeypatch):
    launched = []

    def clock(launches, repeats):
        launched.append([launch() for launch in launches])
        return 2.0

    monkeypatch.setattr(kernels, "time_launches", clock)
    monkeypatch.setattr(kernels, "_cache_bytes", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    row = kernels.measure(registry.get("rms_norm"), {"T": 2, "H": 64}, DEVICE, 1, CEILINGS)
    assert row["bytes"] == (2 * 2 * 64 + 64) * 2
    assert row["dtype"] == "bfloat16"
    assert row["share"] == pytest.approx(row["bytes"] / 4e12 * 1e6 / 2.0)
    assert len(launched[0]) == 4  # copies of 640 bytes, for twice 1,000
    assert row["cold"]
    result = {"results": {"ceilings": CEILINGS, "kernels": [row]}, "setting": kernels.setting(model="no model", dtype="")}
    table = report.TABLES["kernels"](result)
    assert "| rms_norm | T 2, H 64 | bfloat16 | 2.0 | 0.00 | 0% |" in table
    assert "4.00 TB/s read, 3.00 TB/s copied" in table


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_kernel_is_measured():
    result = kernels.run(["rms_norm"], repeats=3)
    assert all(0 < row["microseconds"] < 1e5 for row in result.results["kernels"])
    assert all(row["share"] < 1.2 for row in result.results["kernels"] if row["cold"])


def test_one_command_measures_all_of_a_gpu_and_keeps_both_results(monkeypatch, tmp_path):
    asked = []

    def result(topic, ok):
        return Result(topic, kernels.setting(model="", dtype=""), results={}, checks=[check("it", float(ok), ">=", 1.0)])

    def offline_run(options, model_config):
        asked.append((options["max_num_seqs"], model_config))
        return result("offline", ok=True)

    monkeypatch.setattr(kernels, "run", lambda names: result("kernels", ok=False))
    monkeypatch.setattr(offline, "run", offline_run)
    done = CliRunner().invoke(bench, ["gpu", "--max-num-seqs", "512", "--save", str(tmp_path)])
    assert done.exit_code == 1, "a check of the first failed"
    assert asked == [(512, "llama-3-8b")]
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["kernels", "offline"]
