"""Shapes are checked at run time in tests: jaxtyping's annotations, by beartype, in every module that computes."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test never asks the Hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jaxtyping  # noqa: E402

CHECKED = ["kernels", "layers", "attention", "models", "sampling", "executor"]
jaxtyping.install_import_hook([f"refimpl.{name}" for name in CHECKED], "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def smollm2():
    """The folder of the embedded model's converted copy; downloaded on the first run."""
    from refimpl.loading.pull import embedded_checkpoint_folder

    return embedded_checkpoint_folder()
