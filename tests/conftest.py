"""Settings and fixtures of all tests, and how they are spread over processes."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test never asks the Hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import counts
import interpreter
import pytest
import torch

if not torch.cuda.is_available():
    # Kernels run by Triton's interpreter. Triton reads this once, and transformers imports it.
    os.environ["TRITON_INTERPRET"] = "1"

SHARES_THE_MACHINE = "PYTEST_XDIST_WORKER" in os.environ
"""Whether this is one of several processes, one a core."""
if SHARES_THE_MACHINE:
    os.environ["OMP_NUM_THREADS"] = "1"  # for what a test starts: there is no core for a second thread
    os.environ["REFIMPL_SHARED_MACHINE"] = "1"  # and in a notebook no time means anything

FILES_A_WORKER = 9
"""So many files are worth a process more, which imports torch and collects all tests again."""

LONGEST = [
    "test_notebooks",
    "test_notebooks_in_browser",
    "test_aot",
    "test_browser",
    "test_identity",
    "test_parity",
    "test_cuda_graphs",
    "test_cli",
    "test_specs",
    "test_drafts_in_engine",
    "test_bench",
    "test_sampling_in_engine",
    "test_beam_search",
    "test_readme",
]
"""Files that take half a minute and more. They begin: at the end one worker would be at them, and the others idle."""


def pytest_xdist_auto_num_workers(config):
    """A worker a core for many files; none for few, nor where there is a GPU, whose memory some tests read."""
    from refimpl.doctor.machine import usable_cores

    if torch.cuda.is_available():
        return 0
    given = [config.invocation_params.dir / arg.split("::")[0] for arg in config.args]
    files = {file for path in given for file in (path.rglob("test_*.py") if path.is_dir() else [path])}
    workers = min(usable_cores(), len(files) // FILES_A_WORKER)
    return workers if workers > 1 else 0


def pytest_collection_modifyitems(items):
    """The longest files first, each whole."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """An engine collects garbage when it closes; what the imports made by now need not be looked through each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A test and its fixtures find torch the same whatever ran before: its random numbers, and its number of threads.

    The tiny model's products are too small to share between threads; the embedded model's are not.
    """
    interpreter.quicken()  # if Triton has been imported by now
    torch.manual_seed(0)
    torch.set_num_threads(2 if "smollm2" in item.fixturenames and not SHARES_THE_MACHINE else 1)


def pytest_sessionfinish(session):
    """What is frozen would never be freed, and bindings that count their objects complain at the exit."""
    gc.unfreeze()
    if SHARES_THE_MACHINE:
        session.config.workeroutput |= {"counts": dict(counts.COUNTS), "said": counts.SAID}


def pytest_testnodedown(node):
    """A worker has ended: what it counted and said joins the others'."""
    output = getattr(node, "workeroutput", {})
    counts.COUNTS.update(output.get("counts", {}))
    counts.SAID += output.get("said", [])


def pytest_terminal_summary(terminalreporter):
    """What the proofs were put through, in figures."""
    if line := counts.summary():
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def smollm2():
    """The folder of the embedded model's converted copy; downloaded on the first run."""
    from refimpl.loading.pull import embedded_checkpoint_folder

    return embedded_checkpoint_folder()
