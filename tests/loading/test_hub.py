"""Checkpoints of the Hub: from its cache, downloaded, and what is told where they cannot be had. No network is needed."""

import errno
from types import SimpleNamespace

import pytest
from checkpoint_files import random_llama, save_folder
from huggingface_hub import errors

from refimpl.errors import ModelError, ModelNotFoundError
from refimpl.loading import hub as hub_module
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.loading.hub import hub_checkpoint_folder

NAME = "meta-llama/Meta-Llama-3-70B-Instruct"


@pytest.fixture(scope="module")
def model():
    return random_llama()


class FakeHub:
    """Stands in for snapshot_download: what the local cache holds, and what the network gives.

    What is raised comes of the dry run already; ``broken`` comes of the download after it.
    """

    def __init__(self, local=None, remote=None, size=1000, broken=None):
        self.local, self.remote, self.size, self.broken = local, remote, size, broken
        self.calls = []

    def __call__(self, name, allow_patterns, ignore_patterns, local_files_only=False, dry_run=False):
        self.calls.append("local" if local_files_only else "dry" if dry_run else "download")
        self.patterns = allow_patterns, ignore_patterns
        found = self.local if local_files_only else self.remote
        if isinstance(found, Exception):
            raise found
        if found is None:
            raise errors.LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder\nmore lines")
        if dry_run:
            there = SimpleNamespace(file_size=10**15, will_download=False)
            return [SimpleNamespace(file_size=self.size, will_download=True), there]
        if self.broken is not None and not local_files_only:
            raise self.broken
        return str(found)


@pytest.fixture
def hub(monkeypatch):
    def install(**what):
        fake = FakeHub(**what)
        monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
        return fake

    return install


# ---------------------------------------------------------------------- what can be had


def test_a_model_in_the_hubs_cache_needs_no_network(hub, model, tmp_path, capfd):
    save_folder(model, tmp_path)
    fake = hub(local=tmp_path)
    capfd.readouterr()  # save_pretrained draws a bar
    checkpoint = open_checkpoint("some-org/Some.Model-1B")
    assert (checkpoint.folder, checkpoint.name) == (tmp_path, "some-org/Some.Model-1B")
    assert fake.calls == ["local"]
    assert capfd.readouterr().err == ""


def test_a_model_on_the_hub_is_downloaded_with_a_word(hub, model, tmp_path, capfd):
    save_folder(model, tmp_path)
    fake = hub(remote=tmp_path)
    assert hub_checkpoint_folder("org/name") == tmp_path
    assert fake.calls == ["local", "dry", "download"]
    wanted, unwanted = fake.patterns
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in wanted)
    assert "original/*" in unwanted
    assert "downloading org/name from the Hub" in capfd.readouterr().err


def test_a_partial_copy_in_the_hubs_cache_is_completed(hub, model, tmp_path):
    """Another program may have fetched the configuration alone."""
    whole = save_folder(model, tmp_path / "whole")
    part = tmp_path / "part"
    part.mkdir()
    (part / "config.json").write_text((whole / "config.json").read_text())
    fake = hub(local=part, remote=whole)
    assert hub_checkpoint_folder("org/name") == whole
    assert fake.calls == ["local", "dry", "download"]


# ---------------------------------------------------------------------- what cannot


def http(kind, status):
    """One of the Hub's own errors, as its client raises it."""
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind(f"{status} Client Error.\n\nmore lines", response=response)


def caused(error, cause):
    """An error as the Hub's client wraps it: ``raise error from cause``."""
    error.__cause__ = cause
    return error


DRY = errors.DryRunError("Dry run cannot be performed as the repository cannot be accessed.")
FAILURES = {
    "gated": (
        http(errors.GatedRepoError, 403),
        [f"accept its licence at https://huggingface.co/{NAME}", "`hf auth login`", "HF_TOKEN", "GatedRepoError: 403"],
    ),
    "gated, and not logged in": (
        caused(DRY, http(errors.GatedRepoError, 401)),
        ["It is gated: accept its licence", "`hf auth login`", "HF_TOKEN", "GatedRepoError: 401"],
    ),
    "no such model": (
        http(errors.RepositoryNotFoundError, 404),
        ["There is no such model, or it is private: check the name", "`hf auth login`", "HF_TOKEN"],
    ),
    "a token that is wrong": (
        http(errors.HfHubHTTPError, 401),
        ["The Hub refuses your token", "`hf auth login`", "HF_TOKEN"],
    ),
    "no branch": (http(errors.RevisionNotFoundError, 404), ["It has no branch main", f"https://huggingface.co/{NAME}/tree"]),
    "switched off": (http(errors.DisabledRepoError, 403), ["The Hub has switched it off"]),
    "asked too often": (http(errors.HfHubHTTPError, 429), ["asked too often from here: wait a while"]),
    "the Hub is down": (http(errors.HfHubHTTPError, 503), ["trouble of its own: try again later"]),
    "offline by a variable": (
        caused(errors.DryRunError("cannot"), errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")),
        ["HF_HUB_OFFLINE is set: unset it", "`hf download`"],
    ),
    "no network": (
        caused(errors.DryRunError("cannot"), caused(ConnectionError("all attempts failed"), OSError("no route to host"))),
        ["(OSError: no route to host)", "Check the name and the network"],
    ),
    "a name that cannot be": (
        errors.HFValidationError("Repo id must"),
        ["Check the name,", "HFValidationError: Repo id must"],
    ),
    "nothing known": (None, ["Check the name and the network", "`hf auth login` if it is gated"]),
    "anything": (RuntimeError("client closed"), ["(RuntimeError: client closed)"]),
    "without a word": (ConnectionError(), ["(ConnectionError)"]),
}


@pytest.mark.parametrize(("error", "said"), FAILURES.values(), ids=FAILURES)
def test_a_model_that_cannot_be_had_is_told_with_what_to_do(hub, error, said):
    hub(remote=error)
    with pytest.raises(ModelNotFoundError) as caught:
        open_checkpoint(NAME)
    message = str(caught.value)
    assert message.startswith(f"{NAME} cannot be had from the Hub (")
    assert message.endswith(", or give --model a local folder or GGUF file")
    assert [part for part in said if part not in message] == []
    assert "\n" not in message


def test_a_name_that_the_hub_refuses_is_told():
    with pytest.raises(ModelNotFoundError, match="cannot be had from the Hub"):
        open_checkpoint("org--x/na..me")


# ---------------------------------------------------------------------- the disk


def test_a_download_that_the_disk_cannot_hold_is_refused_with_the_sum(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_module, "hub_cache", lambda: tmp_path / "not" / "there" / "yet")
    asked = []
    monkeypatch.setattr(
        hub_module.shutil, "disk_usage", lambda folder: asked.append(folder) or SimpleNamespace(free=49 * 10**9)
    )
    fake = hub(remote=tmp_path, size=141 * 10**9)
    with pytest.raises(
        ModelError, match=r"takes 141\.0 GB more on the disk, and .*yet has 49\.0 GB free.*set HF_HOME"
    ) as caught:
        hub_checkpoint_folder(NAME)
    assert (caught.value.numbers["needed"], caught.value.numbers["free"]) == (141 * 10**9, 49 * 10**9)
    assert fake.calls == ["local", "dry"], "nothing is downloaded"
    assert asked == [tmp_path]
    hub(remote=tmp_path, size=40 * 10**9)
    assert hub_checkpoint_folder(NAME) == tmp_path


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_disk_that_fills_up_meanwhile_is_told(hub, tmp_path, wrapped):
    full = OSError(errno.ENOSPC, "No space left on device")
    hub(remote=tmp_path, broken=caused(RuntimeError("a worker failed"), full) if wrapped else full)
    with pytest.raises(ModelError, match=r"became full while .* was downloaded: make room .*set HF_HOME"):
        hub_checkpoint_folder(NAME)
