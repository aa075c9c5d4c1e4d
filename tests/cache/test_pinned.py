"""Page-locked memory: whole pages of exactly the size, unlocked once, by its owner. With a runtime that only notes."""

import contextlib
import gc
from mmap import PAGESIZE

import pytest
import torch

from refimpl.cache import pinned
from refimpl.cache.pinned import PinnedMemory
from refimpl.errors import OutOfMemoryError

DEVICE = torch.device("cuda", 0)


class Runtime:
    """The two calls of CUDA's runtime, and what they were given."""

    def __init__(self):
        self.locked, self.unlocked = [], []

    def cudaHostRegister(self, pointer, size, flags):
        self.locked.append((pointer, size))
        return 0

    def cudaHostUnregister(self, pointer):
        self.unlocked.append(pointer)
        return 0


@pytest.fixture
def runtime(monkeypatch):
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return found


@pytest.mark.parametrize("shape", [(1, 3), (PAGESIZE // 2,), (5, PAGESIZE + 1)])
def test_whole_pages_are_locked_and_no_more_than_needed(runtime, shape):
    memory = PinnedMemory(shape, torch.bfloat16, DEVICE)
    [(pointer, size)] = runtime.locked
    assert memory.tensor.shape == shape
    assert pointer == memory.tensor.data_ptr()
    assert pointer % PAGESIZE == size % PAGESIZE == 0
    assert 0 <= size - memory.tensor.nbytes < PAGESIZE
    memory.release()


def test_it_is_given_back_once_though_somebody_still_has_the_tensor(runtime):
    memory = PinnedMemory((10,), torch.float32, DEVICE)
    tensor = memory.tensor
    memory.release()
    memory.release()
    del memory
    gc.collect()
    assert len(runtime.unlocked) == 1
    assert tensor.untyped_storage().nbytes() == 0


def test_what_nobody_releases_is_given_back_when_it_is_collected(runtime):
    PinnedMemory((10,), torch.float32, DEVICE)
    gc.collect()
    assert runtime.unlocked == [runtime.locked[0][0]]


def test_a_child_leaves_its_parents_memory_locked(runtime, monkeypatch):
    memory = PinnedMemory((10,), torch.float32, DEVICE)
    monkeypatch.setattr(pinned.os, "getpid", lambda: -1)
    memory.release()
    assert runtime.unlocked == []


def test_memory_that_cannot_be_locked_is_told(runtime, monkeypatch):
    def fails(code):
        raise RuntimeError("out of memory (2)")

    monkeypatch.setattr(torch.cuda, "check_error", fails)
    with pytest.raises(OutOfMemoryError, match=r"0\.01 GiB of the host's memory could not be locked.*lower swap_space"):
        PinnedMemory((2**23,), torch.uint8, DEVICE)
