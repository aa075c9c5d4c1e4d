"""The benchmark of kernels: its arithmetic, with a clock and a cache in place of the GPU's, and what it says without one."""

import pytest
import torch
from kernel_device import DEVICE, ON_GPU
from typer.testing import CliRunner

from refimpl.attention import flash
from refimpl.bench import idle, kernels, offline, report, serve_sim, startup
from refimpl.bench.commands import bench
from refimpl.bench.kernel_checks import checks_of
from refimpl.bench.peer_attention import FlashAttentionPeer
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


def decode(S, L, Hkv=8, ours=10.0, theirs=None, size=10**6, share=0.5):
    row = {"kernel": "paged_attention", "shape": {"S": S, "n": 1, "L": L, "Hkv": Hkv}, "bytes": size, "share": share}
    return row | {"microseconds": ours} | ({} if theirs is None else {"peer_microseconds": theirs})


def prefill(n, L, ours, theirs):
    shape = {"S": 1, "n": n, "L": L, "Hkv": 8}
    row = {"kernel": "flash_attention", "shape": shape, "bytes": 1, "share": 0.5, "flops": 4.5e12}
    return row | {"microseconds": ours, "peer_microseconds": theirs}


def test_checks_hold_each_figure_against_its_bound():
    rows = [
        decode(1, 1024, theirs=20.0),
        decode(8, 1024, theirs=5.0),
        decode(64, 4096, theirs=9.8, size=2 * 10**9, share=0.93),
        decode(64, 4096, Hkv=1, theirs=9.0),
        prefill(16384, 16384, ours=10_000.0, theirs=7_000.0),
        prefill(2048, 16384, ours=10.0, theirs=5.0),
        {"kernel": "silu_mul", "shape": {"T": 8192}, "bytes": 3e8, "microseconds": 100.0, "copy_microseconds": 95.0},
        {"kernel": "silu_mul", "shape": {"T": 64}, "bytes": 1e6, "microseconds": 100.0},
    ]
    found = {one.name: (pytest.approx(one.value), one.ok) for one in checks_of(rows)}
    assert found == {
        "decode_attention_share": (0.93, True),
        "prefill_tflops": (450, True),
        "small_decodes_over_flash_attention": (1.0, True),
        "least_small_decode_over_flash_attention": (0.5, False),
        "large_decodes_over_flash_attention": (0.98, True),
        "one_kv_head_over_flash_attention": (0.9, False),
        "prefills_over_flash_attention": (0.5, False),
        "moving_kernels_over_copy": (0.95, True),
    }
    sizes = {"out_features": 57344, "in_features": 8192}
    four_bits = [
        {"kernel": "awq_linear", "shape": {"T": T} | sizes, "bytes": 2e8, "share": share, "microseconds": 70.0}
        | {"library_microseconds": 210.0}
        for T, share in ((1, 0.8), (16, 0.6))
    ]
    assert [(one.name, one.value, one.ok) for one in checks_of(four_bits)] == [
        ("four_bits_share_1", 0.8, True),
        ("four_bits_over_16_1", 3.0, True),
        ("four_bits_share_16", 0.6, False),
    ]
    alone = [{name: value for name, value in row.items() if name != "peer_microseconds"} for row in rows[:3]]
    assert [one.name for one in checks_of(alone)] == ["decode_attention_share"]


class Library:
    """Stands for vLLM's FlashAttention-3."""

    def __init__(self):
        self.calls, self.plans = [], []

    def flash_attn_varlen_func(self, query, k, v, **options):
        self.calls.append(options)

    def get_scheduler_metadata(self, **options):
        self.plans.append(options)
        return "a plan"


def test_flash_attention_is_measured_beside_by_a_plan_made_beforehand(monkeypatch):
    library = Library()
    vllm = next(one for one in flash.INTERFACES if one.module.startswith("vllm"))
    monkeypatch.setattr(flash, "find", lambda capability: (vllm, library))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "_cache_bytes", lambda device: 1)
    monkeypatch.setattr(kernels, "time_launches", lambda launches, repeats: [launch() for launch in launches] and 2.0)
    peer = FlashAttentionPeer(DEVICE)
    shape = {"S": 2, "n": 1, "L": 20, "Hq": 2, "Hkv": 1, "D": 64, "B": 16}
    row = kernels.measure(registry.get("paged_attention"), shape, DEVICE, 1, CEILINGS, peer)
    assert row["peer_microseconds"] == 2.0
    assert library.plans[0]["batch_size"] == 2
    assert library.calls[0]["scheduler_metadata"] == "a plan"
    assert library.calls[0]["max_seqlen_k"] == 20
    kernels.measure(registry.get("flash_attention"), shape | {"n": 20}, DEVICE, 1, CEILINGS, peer)
    assert "scheduler_metadata" not in library.calls[-1], "a prefill plans within its call"
    other_blocks = kernels.measure(registry.get("paged_attention"), shape | {"B": 8}, DEVICE, 1, CEILINGS, peer)
    assert "peer_microseconds" not in other_blocks
    result = {"results": {"ceilings": CEILINGS, "peer": peer.title, "kernels": [row, other_blocks]}}
    table = report.TABLES["kernels"](result | {"setting": kernels.setting(model="no model", dtype="")})
    assert "share of the ceiling | FlashAttention-3 of vLLM" in table
    assert "| 2.0 |\n" in table


def test_what_moves_much_is_timed_beside_a_copy_of_as_many_bytes(monkeypatch):
    clocked = []
    monkeypatch.setattr(kernels, "time_launches", lambda launches, repeats: clocked.append(launches) or 2.0)
    monkeypatch.setattr(kernels, "_cache_bytes", lambda device: 1)
    monkeypatch.setattr(kernels, "MOVED", 500)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    row = kernels.measure(registry.get("rms_norm"), {"T": 2, "H": 64}, DEVICE, 1, CEILINGS)
    assert row["copy_microseconds"] == 2.0
    assert [launch().nbytes for launch in clocked[1]] == [row["bytes"] // 8 * 4] * 2
    assert "copy_microseconds" not in kernels.measure(registry.get("rms_norm"), {"T": 1, "H": 32}, DEVICE, 1, CEILINGS)


def test_compare_takes_flash_attn_or_none():
    done = CliRunner().invoke(bench, ["kernels", "--compare", "vllm"])
    assert "compare is 'vllm'; it must be flash-attn or none" in str(done.exception)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_kernel_is_measured():
    result = kernels.run(["rms_norm"], repeats=3)
    assert all(0 < row["microseconds"] < 1e5 for row in result.results["kernels"])
    assert all(row["share"] < 1.2 for row in result.results["kernels"] if row["cold"])


def test_one_command_measures_all_of_a_gpu_and_keeps_every_result(monkeypatch, tmp_path):
    asked = []

    def result(topic, ok):
        return Result(topic, kernels.setting(model="", dtype=""), results={}, checks=[check("it", float(ok), ">=", 1.0)])

    def offline_run(options, model_config):
        asked.append((options["max_num_seqs"], model_config))
        return result("offline", ok=True)

    monkeypatch.setattr(kernels, "run", lambda names, **options: result("kernels", ok=False))
    monkeypatch.setattr(offline, "run", offline_run)
    for name, module in (("startup", startup), ("serve-sim", serve_sim), ("idle", idle)):
        monkeypatch.setattr(module, "run", lambda *args, name=name, **options: result(name, ok=True))
    done = CliRunner().invoke(bench, ["gpu", "--max-num-seqs", "512", "--save", str(tmp_path)])
    assert done.exit_code == 1, "a check of the first failed"
    assert asked == [(512, "llama-3-8b")]
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == [
        "idle",
        "kernels",
        "offline",
        "serve",
        "startup",
    ]
