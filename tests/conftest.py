"""Settings and fixtures of all tests."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test never asks the Hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import counts
import pytest
import torch

if not torch.cuda.is_available():
    # Kernels run by Triton's interpreter. Triton reads this once, and transformers imports it.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_finish():
    """An engine collects garbage when it closes; what the imports made need not be looked through each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """What is frozen would never be freed, and bindings that count their objects complain at the exit."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter):
    """What the proofs were put through, in figures."""
    if line := counts.summary():
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def threads(request):
    """The tiny model's products are too small to share between threads; the embedded model's are not."""
    torch.set_num_threads(2 if "smollm2" in request.fixturenames else 1)


@pytest.fixture(scope="session")
def smollm2():
    """The folder of the embedded model's converted copy; downloaded on the first run."""
    from refimpl.loading.pull import embedded_checkpoint_folder

    return embedded_checkpoint_folder()
