"""The compiled operations of a CPU beside torch's, which are tested against transformers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from refimpl.attention.backend import AttentionMetadata
from refimpl.attention.native_paged import MOST_TOKENS, NativePagedAttention
from refimpl.attention.torch_paged import TorchPagedAttention
from refimpl.bench.flops import flop_counter
from refimpl.cache.kv_cache import LayerKV
from refimpl.kernels import native
from refimpl.layers.activation import silu_mul
from refimpl.layers.norm import RMSNorm
from refimpl.layers.rotary import Rotation, rotate

needs_compiler = pytest.mark.skipif(bool(native.obstacle()), reason=native.obstacle())
BOUND = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
BOTH = pytest.mark.parametrize("dtype", list(BOUND))
CONTEXTS = [1, 16, 17, 90]
D, HKV, G, BLOCK = 24, 2, 3, 16


def close(found, wanted, dtype):
    torch.testing.assert_close(found.float(), wanted.float(), rtol=BOUND[dtype], atol=BOUND[dtype])


def step_of(dtype, query_lens=(1, 1, 1, 1)):
    """A cache whose unwritten slots are NaN, and the step of the last so many tokens of each context."""
    tables = torch.tensor([[6 * s + b + 1 for b in range(6)] for s in range(len(CONTEXTS))]).flip(1)
    shape = (25, BLOCK, HKV, D)
    layer = LayerKV(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
    slots = []
    for table, context, new in zip(tables, CONTEXTS, query_lens, strict=True):
        for place in range(context):
            for pages in (layer.k, layer.v):
                pages[table[place // BLOCK], place % BLOCK] = torch.randn(HKV, D).to(dtype)
        slots += [int(table[place // BLOCK]) * BLOCK + place % BLOCK for place in range(context - new, context)]
    return layer, AttentionMetadata.of(list(query_lens), CONTEXTS, BLOCK, tables, torch.tensor(slots))


@needs_compiler
@BOTH
@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize(
    "query_lens",
    [
        pytest.param((1, 1, 1, 1), id="decodes"),
        pytest.param((1, 3, 2, MOST_TOKENS), id="checks"),
        pytest.param((1, 16, MOST_TOKENS + 1, 1), id="decodes-around-a-prompt"),
        pytest.param((1, 2, 17, 40), id="prompt-and-chunk"),
    ],
)
def test_attention_is_torchs_in_float64_and_reads_no_slot_beyond_a_context(dtype, window, query_lens):
    layer, metadata = step_of(dtype, query_lens)
    query = torch.randn(sum(query_lens), HKV * G, D).to(dtype)
    found = NativePagedAttention(D**-0.5).begin_step(metadata).attend(layer, query, window)
    wide = LayerKV(layer.k.double(), layer.v.double())
    wanted = TorchPagedAttention(D**-0.5).begin_step(metadata).attend(wide, query.double(), window)
    assert found.isfinite().all()
    close(found, wanted, dtype)


@needs_compiler
@BOTH
def test_a_checked_token_has_the_very_numbers_of_its_decode(dtype):
    layer, metadata = step_of(dtype, (1, 3, 2, 16))
    query = torch.randn(22, HKV * G, D).to(dtype)
    backend = NativePagedAttention(D**-0.5)
    found = backend.begin_step(metadata).attend(layer, query)
    for token in range(16):
        context = CONTEXTS[3] - 15 + token
        decode = AttentionMetadata.of([1], [context], BLOCK, metadata.block_table[3:], metadata.slot_mapping[:1])
        assert torch.equal(backend.begin_step(decode).attend(layer, query[6 + token : 7 + token])[0], found[6 + token])


@needs_compiler
@BOTH
def test_queries_and_keys_are_turned_and_stored_as_torchs_are(dtype):
    layer, metadata = step_of(dtype)
    other = LayerKV(layer.k.clone(), layer.v.clone())
    heads = torch.randn(len(CONTEXTS), HKV * (G + 2), D).to(dtype)
    angles = torch.randn(len(CONTEXTS), D // 2)
    sin = torch.stack((-angles.sin(), angles.sin()), dim=1).unsqueeze(1)
    rotation = Rotation(angles.cos()[:, None, None], sin)
    step = NativePagedAttention(D**-0.5).begin_step(metadata)
    query = step.turn_and_write_heads(layer, heads, HKV * G, rotation.cos, rotation.signed_sin)
    turned = rotate(heads[:, : HKV * (G + 1)].float(), rotation).to(dtype)
    plain = TorchPagedAttention(D**-0.5).begin_step(metadata)
    plain.write(other, turned[:, HKV * G :], heads[:, HKV * (G + 1) :])
    close(query, turned[:, : HKV * G], dtype)
    for found, wanted in ((layer.k, other.k), (layer.v, other.v)):
        close(found.nan_to_num(7), wanted.nan_to_num(7), dtype)


@needs_compiler
@BOTH
def test_norms_and_swiglu_are_torchs(dtype):
    x, residual = torch.randn(3, 40).to(dtype), torch.randn(3, 40)
    norm = RMSNorm(40, 1e-5, torch.float32, torch.device("cpu"))
    torch.nn.init.normal_(norm.weight)
    summed = residual + x.float()
    normed, kept = norm(x, residual.clone())
    close(kept, summed, torch.float32)
    close(normed, norm.plainly(summed), torch.float32)
    narrow = RMSNorm(40, 1e-5, dtype, torch.device("cpu"))
    torch.nn.init.ones_(narrow.weight)
    close(narrow(x, residual.clone())[0], narrow.plainly(summed), torch.float32)
    gate_up = torch.cat((torch.linspace(-200, 200, 41), torch.randn(41)))[None].to(dtype)
    close(silu_mul(gate_up), torch.nn.functional.silu(gate_up[:, :41].float()) * gate_up[:, 41:].float(), dtype)
    assert silu_mul(torch.full((1, 4), torch.nan, dtype=dtype)).isnan().all()


@needs_compiler
@BOTH
def test_threads_that_share_long_prompts_do_the_same(dtype):
    T = 1000
    assert T * HKV * G * D > 2**16, "so many that they are shared"
    shape = (65, BLOCK, HKV, D)
    ours, theirs = (LayerKV(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(2))
    slots = torch.arange(BLOCK, BLOCK + T).flip(0)
    metadata = AttentionMetadata.of([T], [T], BLOCK, torch.arange(1, 64)[None], slots)
    heads, angles = torch.randn(T, HKV * (G + 2), D).to(dtype), torch.randn(T, D // 2)
    rotation = Rotation(angles.cos()[:, None, None], torch.stack((-angles.sin(), angles.sin()), dim=1).unsqueeze(1))
    step = NativePagedAttention(D**-0.5).begin_step(metadata)
    query = step.turn_and_write_heads(ours, heads, HKV * G, rotation.cos, rotation.signed_sin)
    turned = rotate(heads[:, : HKV * (G + 1)].float(), rotation).to(dtype)
    TorchPagedAttention(D**-0.5).begin_step(metadata).write(theirs, turned[:, HKV * G :], heads[:, HKV * (G + 1) :])
    for found, wanted in ((query, turned[:, : HKV * G]), (ours.k, theirs.k), (ours.v, theirs.v)):
        close(found, wanted, dtype)
    x, residual = torch.randn(T, 80).to(dtype), torch.randn(T, 80)
    norm = RMSNorm(80, 1e-5, torch.float32, torch.device("cpu"))
    torch.nn.init.ones_(norm.weight)
    normed, summed = norm(x, residual.clone())
    close(summed, residual + x.float(), torch.float32)
    close(normed, norm.plainly(residual + x.float()), torch.float32)
    gate_up = torch.randn(T, 160).to(dtype)
    close(silu_mul(gate_up), torch.nn.functional.silu(gate_up[:, :80].float()) * gate_up[:, 80:].float(), dtype)


@pytest.fixture
def remade(monkeypatch):
    """``library`` as a new process finds it: what was made and asked before is forgotten, before the test and after."""
    native._made.cache_clear()
    yield native.library
    native._made.cache_clear()


def pretend_compiler(monkeypatch, folder, script):
    """A compiler that is a few lines of shell, the only one there is."""
    folder.mkdir()
    (folder / "c++").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "c++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@needs_compiler
def test_a_library_is_made_once_and_made_anew_where_its_file_is_damaged(remade, monkeypatch, tmp_path):
    monkeypatch.setenv("REFIMPL_CACHE", str(tmp_path / "cache"))
    assert remade() is not None
    [kept] = (tmp_path / "cache").iterdir()
    pretend_compiler(monkeypatch, tmp_path / "none", "exit 1")
    native._made.cache_clear()
    assert remade() is None, "another compiler's is another library"
    monkeypatch.undo()
    monkeypatch.setenv("REFIMPL_CACHE", str(tmp_path / "cache"))
    for content in (b"", b"no library"):
        kept.unlink()  # the one that this process has loaded stays whole
        kept.write_bytes(content)
        native._made.cache_clear()
        assert remade() is not None
        assert kept.read_bytes()[:4] == b"\x7fELF"


@needs_compiler
@pytest.mark.parametrize("folder", ["/proc/nothing", "file/cache"])
def test_where_nothing_can_be_kept_a_process_makes_a_library_for_itself(remade, monkeypatch, tmp_path, folder):
    (tmp_path / "file").touch()
    monkeypatch.setenv("REFIMPL_CACHE", str(tmp_path / folder))
    assert remade() is not None
    assert native.obstacle() == ""


@needs_compiler
def test_a_user_without_a_home_has_a_library_too(remade, monkeypatch):
    for name in ("REFIMPL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert remade() is not None


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'note: x' >&2; echo \"x.cpp:1: error: no -march\" >&2; exit 1",
            r"c\+\+ did not make .*: x.cpp:1: error: no -march",
        ),
        ("exit 3", "ended with code 3"),
        ("exit 0", "did not make a library that loads here: .*made.so"),
    ],
)
def test_a_compiler_that_fails_is_told_of_by_its_own_words(remade, monkeypatch, tmp_path, script, said):
    monkeypatch.setenv("REFIMPL_CACHE", str(tmp_path / "cache"))
    pretend_compiler(monkeypatch, tmp_path / "bin", script)
    assert remade() is None
    assert re.search(said, native.obstacle())
    assert list((tmp_path / "cache").iterdir()) == []


@needs_compiler
def test_the_library_asks_no_compiler_for_threads(remade, monkeypatch, tmp_path):
    """One that brings threads of its own, as Clang does, makes the same library."""
    monkeypatch.setenv("REFIMPL_CACHE", str(tmp_path))
    assert remade() is not None
    [kept] = tmp_path.iterdir()
    assert b"GOMP_parallel" in kept.read_bytes()
    assert b"kmpc" not in kept.read_bytes(), "the names of LLVM's"
    assert not any("openmp" in flag for flag in native.FLAGS)


@pytest.mark.parametrize("told", ["Features\t: fp asimd sve\nCPU part\t: 0xd40\n", "flags\t\t: sse avx2\n"])
def test_each_kind_of_cpu_has_a_library_of_its_own(monkeypatch, told):
    before = native._key("c++")
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: told if self.name == "cpuinfo" else real(self, *a, **k))
    one = native._key("c++")
    told += "CPU revision\t: 1\n"
    assert len({before, one, native._key("c++")}) == 3


@needs_compiler
def test_what_is_trained_is_torchs():
    gate_up = torch.randn(2, 8, requires_grad=True)
    assert not native.by_native(gate_up)
    silu_mul(gate_up).sum().backward()
    assert gate_up.grad is not None


@needs_compiler
def test_what_counts_torchs_operations_sees_them_all():
    layer, metadata = step_of(torch.float32)
    query = torch.randn(len(CONTEXTS), HKV * G, D)
    with flop_counter() as counter:
        NativePagedAttention(D**-0.5).begin_step(metadata).attend(layer, query)
    assert counter.get_total_flops() >= 4 * HKV * G * D * sum(CONTEXTS), "scores and sums, and what torch pads"
