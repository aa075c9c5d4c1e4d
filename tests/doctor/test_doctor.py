"""refimpl doctor: what it finds, what it makes of what is missing, and when it fails."""

import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import refimpl
from refimpl import LLM, EngineArgs
from refimpl.cli import main
from refimpl.doctor import command, lab_check, machine, models, notebooks, versions
from refimpl.doctor.findings import Finding, as_json, passes
from refimpl.errors import RefimplError
from refimpl.executor import device as devices
from refimpl.kernels import native
from refimpl.loading.hf_config import write_config
from refimpl.models.tiny import tiny


@pytest.fixture
def run(monkeypatch, capsys):
    """Run ``refimpl doctor …``: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["refimpl", "doctor", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code or 0, *capsys.readouterr()

    return run


def by_name(findings, area=None):
    return {finding.name: finding for finding in findings if area in (None, finding.area)}


# ---------------------------------------------------------------------- the report


def test_json_holds_everything_that_the_table_shows(run):
    code, out, err = run("tiny", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["ok"] is True
    assert {f["area"] for f in report["findings"]} == {"versions", "machine", "choices", "models", "notebooks"}
    assert all(f["status"] in ("ok", "note", "warning", "error") for f in report["findings"])
    assert all(f["advice"] for f in report["findings"] if f["status"] != "ok")
    found = {(f["area"], f["name"]): f for f in report["findings"]}
    assert found["versions", "torch"]["value"] == torch.__version__
    assert found["choices", "device"]["value"] == str(devices.resolve_device("auto"))
    code, out, _ = run("tiny")
    flat = "".join(out.split())
    assert all("".join(f["value"].split()) in flat for f in report["findings"] if f["area"] in ("versions", "choices"))
    assert out.strip().splitlines()[-1].startswith("no errors; ")


def test_the_kv_cache_is_what_the_engine_makes(monkeypatch):
    """The arithmetic of the executor, not a copy of it: the same bytes give the same blocks."""
    free = 40 * 2**20
    monkeypatch.setattr("refimpl.executor.local.free_host_memory", lambda: free)
    weights = tiny().config.num_parameters * 8
    monkeypatch.setattr(models, "free_host_memory", lambda: free + weights)
    args = EngineArgs(model="tiny", dtype="float64", max_num_seqs=200)
    choices, device, dtype = machine.check_choices(args)
    cache = by_name(models.check_model(args, device, dtype))["KV cache"]
    with LLM("tiny", dtype="float64", max_num_seqs=200) as llm:
        report = llm.memory_report()
        assert llm.engine.scheduler.config.max_model_len == 2048
    assert cache.value.startswith(
        f"{report.usage.num_blocks:,} blocks of 16 tokens ({report.usage.num_blocks * 16:,} tokens"
    )
    assert by_name(choices)["dtype"].value == "float64"


def test_a_cache_that_is_short_or_does_not_fit_is_told(monkeypatch):
    args = EngineArgs(model="tiny", dtype="float32", num_gpu_blocks_override=5)
    cache = by_name(models.check_model(args, torch.device("cpu"), torch.float32))["KV cache"]
    assert cache.status == "note"
    assert "a context of 2,048 tokens is lowered to that" in cache.advice
    monkeypatch.setattr(models, "free_host_memory", lambda: 1000)
    cache = by_name(models.check_model(EngineArgs(model="tiny"), torch.device("cpu"), torch.float32))["KV cache"]
    assert (cache.status, cache.value) == ("error", "does not fit")
    assert "free on cpu" in cache.advice


def test_a_model_that_cannot_be_run_is_an_error(run, tmp_path):
    write_config(tiny().config, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    code, out, _ = run(tmp_path, "--json")
    assert code == 1
    [bad] = [f for f in json.loads(out)["findings"] if f["status"] == "error"]
    assert "MambaForCausalLM" in bad["advice"]
    code, out, _ = run(tmp_path / "nowhere", "--json")
    assert code == 1
    code, out, _ = run("tiny", "--json", "--device", "cuda:99")
    assert code == 1
    assert "cuda:99" in out


def test_a_model_of_the_hub_is_never_downloaded(run, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "hub_folder_if_cached", lambda name: None)
    code, out, err = run("someone/model", "--json")
    assert (code, err) == (0, "")
    [found] = [f for f in json.loads(out)["findings"] if f["name"] == "someone/model"]
    assert (found["status"], found["advice"]) == ("note", "refimpl pull someone/model downloads it")


def test_models_in_both_caches_are_listed(monkeypatch, tmp_path):
    (tmp_path / "hub" / "models--org--one").mkdir(parents=True)
    monkeypatch.setattr(models, "hub_cache", lambda: tmp_path / "hub")
    monkeypatch.setenv("REFIMPL_CACHE", str(tmp_path / "own"))
    found = by_name(models.check_models())
    assert found["the Hub's cache"].value == f"{tmp_path / 'hub'}: org/one"
    assert found["refimpl's cache"].value == f"{tmp_path / 'own'}: 0 folder(s)"
    assert found["smollm2"].status == "warning"
    assert "refimpl pull downloads it" in found["smollm2"].advice
    [about] = models.check_model(EngineArgs(), torch.device("cpu"), torch.float32)
    assert (about.status, about.advice) == ("note", "refimpl pull downloads it")
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    assert "ensurepip" in by_name(models.check_models())["smollm2"].advice


# ---------------------------------------------------------------------- versions


def test_missing_and_old_packages_by_what_needs_them(monkeypatch):
    wanted = {"torch": ("2.11", ""), "gguf": ("0.17", ""), "anywidget": ("0.9.13", "notebooks"), "ruff": ("0.12", "dev")}
    monkeypatch.setattr(versions, "declared", lambda: wanted)
    here = {"torch": "2.9.1+cpu", "anywidget": "0.9.2", "triton": "3.6.0"}
    found = by_name(versions.check_versions(here.get))
    assert (found["torch"].status, found["gguf"].status, found["anywidget"].status) == ("error", "error", "warning")
    assert found["torch"].advice == '2.11 is the least that refimpl is tested with: pip install "torch>=2.11"'
    assert found["gguf"].advice == 'refimpl cannot run without it: pip install "gguf>=0.17"'
    assert "ruff" not in found
    assert (found["triton"].status, found["flash-attn"].status) == ("ok", "note")
    assert not passes(list(found.values()))


def test_a_version_is_compared_by_number():
    assert versions._package("torch", "2.11.0+cu130", "2.11", "").status == "ok"
    assert versions._package("torch", "2.9.0", "2.11", "").status == "error"
    assert versions._package("numpy", "10.0rc1", "9.5", "").status == "ok"


def test_without_torch_the_report_ends_with_the_versions(monkeypatch):
    monkeypatch.setattr(command, "check_versions", lambda: [Finding("versions", "torch", "missing", "error", "install it")])
    assert [finding.name for finding in command.examine(EngineArgs())] == ["torch"]


# ---------------------------------------------------------------------- the machine, and choices with reasons


@pytest.mark.parametrize(
    ("flags", "dtype", "reason"),
    [
        ({"avx2"}, torch.float32, "no native bfloat16: the CPU has none of amx_bf16, avx512_bf16, bf16"),
        ({"avx2", "avx512_bf16"}, torch.bfloat16, "native here: the CPU has avx512_bf16"),
    ],
)
def test_the_dtype_comes_with_its_reason(monkeypatch, flags, dtype, reason):
    monkeypatch.setattr(devices, "cpu_flags", lambda: frozenset(flags))
    assert devices.choose_dtype("auto", torch.device("cpu")) == (dtype, reason)
    assert devices.resolve_dtype("auto", torch.device("cpu")) == dtype
    assert devices.choose_dtype("float64", torch.device("cpu")) == (torch.float64, "as asked for")


def test_the_device_comes_with_its_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    choice = devices.choose_device("auto")
    assert choice.value == torch.device("cpu")
    assert choice.reason.startswith(f"torch {torch.__version__} ")
    assert devices.choose_device("cpu").reason == "as asked for"


def test_the_attention_backend_comes_with_its_reason():
    own = SimpleNamespace(name="mine", begin_step=print)
    choices, _, _ = machine.check_choices(EngineArgs(model="tiny", attention_backend=own))
    assert by_name(choices)["attention"] == Finding("choices", "attention", "mine", advice="an object of your own")


def test_who_serves_what_is_told_with_its_reason(monkeypatch):
    monkeypatch.setattr(native, "_made", lambda: (None, "there is no C++ compiler"))
    choices, _, _ = machine.check_choices(EngineArgs(model="tiny", device="cpu"))
    found = by_name(choices)
    for operation in ("decode attention", "prefill attention", "norms, rotary embedding, SwiGLU", "sampling"):
        assert found[operation].value.startswith("torch")
        assert found[operation].advice.startswith("on a CPU")
    assert found["steps of decodes"].advice == "the device is a CPU"
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    args = EngineArgs(model="tiny")
    assert models._attention(args, tiny().config, device, dtype) == []
    [wide] = models._attention(args, dataclasses.replace(tiny().config, head_dim=320), device, dtype)
    assert (wide.value, wide.status) == ("torch", "note")
    assert "head_dim is 320" in wide.advice


def test_more_threads_than_cores_are_a_warning(monkeypatch):
    monkeypatch.setattr(machine, "usable_cores", lambda: 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    finding = machine.check_threads()
    assert (finding.status, finding.advice) == ("warning", "set OMP_NUM_THREADS=1 before Python starts")


def test_little_memory_and_disk_are_warnings(monkeypatch, tmp_path):
    assert machine.check_memory(2**20).status == "warning"
    assert machine.check_memory(2**33).status == "ok"
    monkeypatch.setattr(machine, "LEAST_DISK", 1)
    assert machine.check_disk(tmp_path / "not" / "yet").status == "ok"
    monkeypatch.setattr(machine, "LEAST_DISK", 2**80)
    assert "REFIMPL_CACHE" in machine.check_disk(tmp_path).advice


def test_widgets_without_their_half_in_jupyterlab_are_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "find_spec", lambda name: name)
    found = by_name(notebooks.check_notebooks(tmp_path))
    assert "pip install --force-reinstall anywidget" in found["anywidget"].advice
    (tmp_path / "share/jupyter/labextensions/anywidget").mkdir(parents=True)
    assert "anywidget" not in by_name(notebooks.check_notebooks(tmp_path))
    monkeypatch.setattr(notebooks, "find_spec", lambda name: None)
    missing = notebooks.check_notebooks(tmp_path)
    assert [f.advice for f in missing if f.status == "warning"] == [notebooks.INSTALL] * 3


def test_without_a_browser_there_is_another_way(monkeypatch):
    monkeypatch.setattr(notebooks.shutil, "which", lambda name: None)
    assert "--no-browser" in by_name(notebooks.check_notebooks())["browser"].advice


# ---------------------------------------------------------------------- --lab


@pytest.fixture
def without_model(monkeypatch):
    monkeypatch.setattr(lab_check, "embedded_folder_if_cached", lambda: None)


def test_a_lab_machine_passes_with_everything_run(tmp_path, without_model, monkeypatch):
    monkeypatch.setattr(lab_check, "PATIENCE", 240.0)  # the machine may be shared
    found = by_name(lab_check.check_lab(tmp_path))
    assert {f.name: f.status for f in found.values() if f.status != "ok" and f.name != "all of it"} == {
        "the engine (smollm2)": "warning"
    }
    assert "books audited" in found["the engine (tiny)"].value
    assert "a block map" in found["widgets"].value
    assert f"{len(list((Path(refimpl.__file__).parent / 'notebooks').glob('*.ipynb')))} to copy" in found["notebooks"].value


def test_an_embedded_model_that_answers_wrongly_fails(monkeypatch):
    monkeypatch.setattr(lab_check, "EMBEDDED_MODEL", "tiny")
    found = lab_check._tried("the engine", lambda: lab_check._run_embedded(time.monotonic() + 240), "pull it again")
    assert found.status == "error"
    assert found.value.startswith("failed: RefimplError: asked for the capital of France, it says ")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_right_answer_does_not_hang_on_rounding(monkeypatch, dtype):
    """Without a compiler attention is torch's, which rounds in another order."""
    made = functools.partial(EngineArgs, dtype=dtype, attention_backend="torch")
    monkeypatch.setattr(lab_check, "EngineArgs", made)
    assert lab_check._run_embedded(time.monotonic() + 240)[0].startswith("answers")


def test_what_takes_too_long_is_cut_off_and_told(monkeypatch):
    monkeypatch.setattr(lab_check, "EMBEDDED_MODEL", "tiny")
    value, advice = lab_check._run_embedded(time.monotonic())
    assert "not answered in time" in value
    assert "close other programs" in advice
    monkeypatch.setattr(lab_check, "IMPORT_LAB", "import time; time.sleep(60)")
    with lab_check._ImportingLab() as importing:
        value, advice = importing.versions(time.monotonic())
        assert value == "is still being imported"
        assert "what else this machine does" in advice
    assert importing._process.returncode is not None


def test_a_broken_jupyterlab_is_told_by_its_last_line(monkeypatch):
    monkeypatch.setattr(lab_check, "IMPORT_LAB", "import nothing_of_this_name")
    with lab_check._ImportingLab() as importing, pytest.raises(RefimplError, match="No module named 'nothing_of_this_name'"):
        importing.versions(time.monotonic() + 240)


def test_what_fails_is_named_with_what_to_do(run, monkeypatch, without_model):
    def broken():
        raise ImportError("no module named anywidget\nmore lines")

    monkeypatch.setattr(lab_check, "_make_widgets", broken)
    monkeypatch.setattr(lab_check, "IMPORT_LAB", "print('jupyterlab')")
    code, out, err = run("tiny", "--lab", "--json")
    assert code == 1
    assert err == ""
    report = json.loads(out)
    [bad] = [f for f in report["findings"] if f["status"] == "error"]
    assert (bad["name"], bad["value"]) == ("widgets", "failed: ImportError: no module named anywidget")
    assert bad["advice"] == 'pip install "refimpl[notebooks]"'
    assert report["counts"]["error"] == 1


def test_a_folder_that_cannot_be_written_to_fails(monkeypatch, without_model, tmp_path):
    monkeypatch.setattr(lab_check.os, "access", lambda *_: False)
    monkeypatch.setattr(lab_check, "IMPORT_LAB", "print('jupyterlab')")
    found = by_name(lab_check.check_lab(tmp_path))
    assert found["notebooks"].status == "error"
    assert str(tmp_path) in found["notebooks"].value


def test_what_is_a_warning_elsewhere_fails_a_lab():
    strict = lab_check.for_a_lab(
        [
            Finding("machine", "disk", "0.1 GiB", "warning", "x"),
            Finding("notebooks", "JupyterLab", "missing", "warning", "x"),
            Finding("machine", "threads", "4", "warning", "x"),
            Finding("machine", "memory", "9 GiB"),
        ]
    )
    assert [finding.status for finding in strict] == ["error", "error", "warning", "ok"]
    assert as_json(strict, "1")["counts"] == {"warning": 1, "error": 2}


def test_the_table_names_every_error_in_its_last_line(tmp_path):
    with (tmp_path / "out").open("w+") as file:
        findings = [Finding("lab", "widgets", "failed", "error", "do [this]"), Finding("lab", "x", "y", "warning", "z")]
        command.show(findings, Console(file=file, width=80))
        file.seek(0)
        text = file.read()
    assert "do [this]" in text
    assert text.splitlines()[-1] == "1 error(s): widgets; 1 warning(s)"
