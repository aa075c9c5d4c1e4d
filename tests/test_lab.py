"""``refimpl lab``: copies the course, keeps what was changed, and says when JupyterLab is missing."""

import subprocess
import sys

import pytest

from refimpl import lab
from refimpl.cli import main
from refimpl.errors import RefimplError
from refimpl.lab import copy_notebooks, open_lab

NOTEBOOK = "00_quickstart.ipynb"


class Started:
    """Stands for the process of JupyterLab: it gets Ctrl-C once, and ends with code 3."""

    def __init__(self, command):
        self.command, self.interrupted = command, False
        Started.last = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self):
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return 3


@pytest.fixture
def jupyterlab(monkeypatch):
    monkeypatch.setattr(lab, "find_spec", lambda name: name)
    monkeypatch.setattr(subprocess, "Popen", Started)


@pytest.fixture
def no_jupyterlab(monkeypatch):
    monkeypatch.setattr(lab, "find_spec", lambda name: None)


def test_the_course_is_copied_whole(tmp_path):
    copied = copy_notebooks(tmp_path / "new" / "folder")
    names = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert names == set(copied.written)
    assert {NOTEBOOK, "01_kv_cache.ipynb", "02_fragmentation.ipynb", "claims.toml"} <= names
    assert not copied.kept + copied.same


def test_a_changed_file_is_kept_and_a_missing_one_written(tmp_path):
    copy_notebooks(tmp_path)
    (tmp_path / NOTEBOOK).write_text("mine")
    (tmp_path / "claims.toml").unlink()
    copied = copy_notebooks(tmp_path)
    assert (copied.kept, copied.written) == ([NOTEBOOK], ["claims.toml"])
    assert (tmp_path / NOTEBOOK).read_text() == "mine"
    assert copy_notebooks(tmp_path, force=True).written == [NOTEBOOK]
    assert copy_notebooks(tmp_path).written == copy_notebooks(tmp_path).kept == []


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RefimplError, match=r"cannot be copied into .*file: .*; name a folder to write to"):
        copy_notebooks(tmp_path / "file")


def test_jupyterlab_is_started_in_the_folder_and_survives_ctrl_c(tmp_path, jupyterlab):
    assert open_lab(tmp_path, browser=False, port=9_999) == 3
    assert Started.last.command == [sys.executable, "-m", "jupyterlab", str(tmp_path), "--no-browser", "--port=9999"]
    assert open_lab(tmp_path) == 3
    assert Started.last.command == [sys.executable, "-m", "jupyterlab", str(tmp_path)]


def test_without_jupyterlab_the_notebooks_are_there_and_the_error_says_what_to_install(
    tmp_path, monkeypatch, capsys, no_jupyterlab
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["refimpl", "lab"])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    assert 'pip install "refimpl[notebooks]"' in capsys.readouterr().err
    assert (tmp_path / "refimpl-notebooks" / NOTEBOOK).exists()


def test_the_command_says_what_it_kept_and_ends_as_jupyterlab_did(tmp_path, monkeypatch, capsys, jupyterlab):
    copy_notebooks(tmp_path)
    (tmp_path / NOTEBOOK).write_text("mine")
    monkeypatch.setattr(sys, "argv", ["refimpl", "lab", str(tmp_path), "--no-browser"])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 3
    assert f"kept, since they differ from ours: {NOTEBOOK} (--force overwrites)" in capsys.readouterr().err
