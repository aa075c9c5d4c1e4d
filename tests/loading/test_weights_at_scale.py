"""How weights are read: from mapped files, only what is wanted, by several threads, with little memory, after a look at the
headers; and what is told when something does not fit."""

import dataclasses
import json
import logging
import re
import struct
import sys
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_files import edit_json, random_llama, save_folder, write_gguf
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from refimpl import LLM, EngineArgs
from refimpl.bench import report
from refimpl.bench.commands import bench
from refimpl.bench.shards import written_shards
from refimpl.config import GIB
from refimpl.errors import CheckpointError, ConfigError, OutOfMemoryError
from refimpl.executor import device as devices
from refimpl.executor import gpu_memory
from refimpl.executor.draft_weights import ModelWeights
from refimpl.kernels import reference, transfer
from refimpl.loading import checkpoint as loading
from refimpl.loading import folder as folders
from refimpl.loading import progress
from refimpl.loading.checkpoint import copy_weights, load_model, open_checkpoint
from refimpl.loading.folder import INDEX, FolderCheckpoint
from refimpl.loading.hf_config import read_config, write_config
from refimpl.loading.in_memory import TransformersCheckpoint
from refimpl.models.registry import build_model
from refimpl.models.tiny import tiny
from refimpl.quantization.fp8 import Fp8, QuantisedPart
from refimpl.quantization.method import fill, weight_bytes
from refimpl.quantization.plain import PLAIN

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return random_llama()


@pytest.fixture
def sharded(model, tmp_path):
    return save_folder(model, tmp_path / "sharded", max_shard_size="60KB")


def load(folder):
    return load_model(FolderCheckpoint(folder), "auto", torch.float32, CPU, 0)


# ---------------------------------------------------------------------- several threads, in order


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1000)


SOURCES = {
    "a matrix": torch.randn(301, 40),
    "a vector": torch.arange(5000.0),
    "columns": torch.randn(301, 40)[:, 8:24],
    "rows": torch.randn(400, 40)[100:301],
    "transposed": torch.randn(40, 301).t(),
    "16 bits": torch.randn(301, 40).to(torch.bfloat16)[:, ::1],
    "FP8": torch.randn(301, 40).to(torch.float8_e4m3fn),
    "every other column": torch.randn(301, 40)[:, ::2],
    "one row": torch.randn(1, 4000),
    "no rows": torch.empty(0, 40),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_what_is_read_ahead_is_the_source_in_order(source, small_pieces):
    pieces = transfer.row_slices(source)
    assert all(source[rows].nbytes <= 1000 or rows.stop - rows.start == 1 for rows in pieces)
    assert len(pieces) > 4 or len(source) < 2
    read = list(transfer.read_ahead(source, pieces, torch.empty_like))
    assert torch.equal(torch.cat([source[:0], *read]).view(torch.uint8), source.contiguous().view(torch.uint8))


def test_readers_run_ahead_but_not_far(small_pieces, monkeypatch):
    """No more pieces are held than there are readers, and one that is asked for next."""
    monkeypatch.setattr(transfer, "num_cores", lambda: 3)
    source, made, names = torch.randn(400, 40), [], set()

    def buffer(piece):
        made.append(len(made))
        return torch.empty_like(piece)

    overwrite = transfer._overwrite
    monkeypatch.setattr(transfer, "_overwrite", lambda *of: names.add(threading.current_thread().name) or overwrite(*of))
    pieces = transfer.row_slices(source)
    for number, _ in enumerate(transfer.read_ahead(source, pieces, buffer)):
        assert len(made) <= number + 1 + 3 + 1
    assert len(made) == len(pieces)
    assert all(name.startswith("refimpl-read") for name in names)


def test_a_reader_that_fails_fails_the_reading_and_no_thread_stays(small_pieces):
    def buffer(piece):
        if torch.equal(piece, source[rows[5]]):
            raise MemoryError("no pinned memory")
        return torch.empty_like(piece)

    source = torch.randn(400, 40)
    rows = transfer.row_slices(source)
    with pytest.raises(MemoryError, match="no pinned memory"):
        list(transfer.read_ahead(source, rows, buffer))
    half_read = transfer.read_ahead(source, rows, torch.empty_like)
    next(half_read)
    half_read.close()
    assert not any(thread.name.startswith("refimpl-read") for thread in threading.enumerate())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_view_is_filled_piece_by_piece_in_its_own_dtype(small_pieces, dtype):
    for source in (torch.randn(301, 40), torch.randn(7), torch.tensor(3.0), torch.randn(301, 40)[:, 8:24]):
        view = torch.empty(source.shape, dtype=dtype)
        fill(view, source)
        assert torch.equal(view, source.to(dtype))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory is a GPU's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_gpu_is_filled_from_a_mapped_file_through_little_pinned_memory(tmp_path, dtype):
    whole = torch.randn(8192, 8192).to(dtype)
    save_file({"one": whole}, tmp_path / "model.safetensors")
    [(_, tensor)] = FolderCheckpoint(tmp_path).weights()
    device = torch.device("cuda")
    for source in (tensor, tensor[1000:5001], tensor[:, 2048:4096], tensor[:1], tensor[0]):
        view = torch.empty(source.shape, dtype=dtype, device=device)
        fill(view, source)
        assert torch.equal(view.cpu().view(torch.uint8), source.contiguous().view(torch.uint8))
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    assert pinned <= 3 * (transfer.MOST_READERS + 2) * transfer.PIECE_BYTES


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory is a GPU's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_rounded_on_its_way_to_a_gpu_is_rounded_as_a_whole_would_be(tmp_path, dtype):
    whole = torch.randn(8192, 8192).to(dtype)
    save_file({"one": whole}, tmp_path / "model.safetensors")
    [(_, tensor)] = FolderCheckpoint(tmp_path).weights()
    device = torch.device("cuda")
    part = QuantisedPart(
        torch.empty(8192, 8192, dtype=torch.float8_e4m3fn, device=device), torch.empty(8192, device=device), dtype
    )
    part.copy_(tensor)
    values, scales = reference.quantise(whole.to(device))
    assert torch.equal(part._scales, scales)
    assert torch.equal(part._values.view(torch.uint8), values.view(torch.uint8))


# ---------------------------------------------------------------------- only what is wanted


class Rows:
    """A destination that keeps some rows, or columns, of a tensor: what tensor parallelism makes."""

    def __init__(self, shape, dim, first, count):
        self.shape, self.device, self._at = torch.Size(shape), CPU, (dim, first, count)
        self.kept = torch.empty([count if i == dim else size for i, size in enumerate(shape)])

    def copy_(self, source):
        fill(self.kept, source.narrow(*self._at))


def mapped_bytes(path):
    """Bytes of a file's pages that this process has touched, as the system counts them."""
    touched, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            touched += 1024 * int(line.split()[1])
    return touched


def test_rows_of_a_mapped_tensor_read_no_other_pages(tmp_path):
    """Of 32 MiB, those that an eighth of the rows lies on, and what the system reads around a fault."""
    path = tmp_path / "model.safetensors"
    whole = torch.randn(8192, 1024)
    save_file({"one": whole}, path)
    [(_, tensor)] = FolderCheckpoint(tmp_path).weights()
    assert mapped_bytes(path) < 2**20, "the header alone"
    kept = torch.empty(1024, 1024)
    fill(kept, tensor[4096:5120])
    assert 4 * 2**20 <= mapped_bytes(path) < 10 * 2**20
    assert torch.equal(kept, whole[4096:5120])
    fill(torch.empty(8192, 1024), tensor)
    assert mapped_bytes(path) >= 32 * 2**20, "the counting counts"
    del tensor
    assert mapped_bytes(path) == 0


def test_destinations_that_keep_parts_are_filled_with_them(model, sharded):
    views = build_model(FolderCheckpoint(sharded).config, torch.float32, CPU).checkpoint_views()
    up, down = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"
    views[up], views[down] = Rows((96, 64), 0, 24, 24), Rows((64, 96), 1, 48, 48)
    checkpoint = FolderCheckpoint(sharded)
    copy_weights(checkpoint.weights(), views, checkpoint)
    tensors = model.state_dict()
    assert torch.equal(views[up].kept, tensors[up][24:48])
    assert torch.equal(views[down].kept, tensors[down][:, 48:])


# ---------------------------------------------------------------------- memory


def memory_of_this_process(key):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return 1024 * int(line.split()[1])


def test_loading_takes_less_than_a_shard_beside_what_is_loaded(tmp_path):
    """As the system counts, pages of mapped files among it: of shards of 14 MB never more than 1.2."""
    config = dataclasses.replace(tiny().config, hidden_size=512, intermediate_size=2048, num_hidden_layers=5)
    checkpoint = written_shards(tmp_path / "shards", config, torch.float32)
    largest = max(path.stat().st_size for path in checkpoint.files())
    views = {name: torch.ones(tensor.shape) for name, tensor in checkpoint.outlines()}
    assert sum(view.nbytes for view in views.values()) > 3 * largest > 40_000_000
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = memory_of_this_process("VmRSS:")
    copy_weights(checkpoint.weights(), views, checkpoint)
    assert memory_of_this_process("VmHWM:") - before < 1.2 * largest
    assert all(torch.equal(views[name], tensor) for name, tensor in checkpoint.weights())


def test_a_file_is_mapped_anew_after_so_many_bytes(model, sharded, monkeypatch):
    """What is let go is unmapped then: no page stays for longer than its window."""
    whole = {name: tensor.clone() for name, tensor in FolderCheckpoint(sharded).weights()}
    opened = []
    monkeypatch.setattr(folders, "MAPPED_BYTES", 1)
    before = folders._opened
    monkeypatch.setattr(folders, "_opened", lambda path: opened.append(path.name) or before(path))
    again = dict(FolderCheckpoint(sharded).weights())
    assert len(opened) == len(again) + len(FolderCheckpoint(sharded).files()), "a look at each, and a mapping a tensor"
    assert whole.keys() == again.keys() == model.state_dict().keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


# ---------------------------------------------------------------------- seen before anything is read


@pytest.fixture
def unread(monkeypatch):
    """No tensor may be copied."""

    def refuse(*_):
        raise AssertionError("something was read")

    monkeypatch.setattr(loading, "fill", refuse)


def rewrite(folder, name, change):
    """Change, or with None take away, a tensor of a sharded folder."""
    path = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    shard = load_file(path)
    tensor = change(shard.pop(name))
    save_file(shard | ({} if tensor is None else {name: tensor}), path)


LAST = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensor: tensor[:-1].clone(), r"misshapen: model\.norm\.weight is \[63\], its configuration makes it \[64\]"),
        (lambda tensor: tensor.to(torch.int32), r"of another type: model\.norm\.weight is int32, not a float type"),
        (lambda tensor: tensor.to(torch.complex64), r"of another type: model\.norm\.weight is complex64, not a float type"),
        (lambda tensor: None, r"names model\.norm\.weight in .*, which does not hold it; download"),
    ],
    ids=["misshapen", "integers", "complex", "missing"],
)
def test_what_does_not_fit_is_told_by_the_headers_alone(sharded, unread, change, said):
    rewrite(sharded, LAST, change)
    with pytest.raises(CheckpointError, match=said):
        load(sharded)


def test_float64_is_a_float_type(sharded, model):
    rewrite(sharded, LAST, lambda tensor: tensor.double())
    assert torch.equal(load(sharded).norm.weight, model.model.norm.weight)


def test_a_missing_shard_is_told_before_another_is_read(sharded, unread):
    last = FolderCheckpoint(sharded).files()[-1]
    last.unlink()
    with pytest.raises(CheckpointError, match=f"has no {re.escape(last.name)}; download"):
        load(sharded)


@pytest.mark.parametrize("lost", [1, 1000])
def test_a_shard_that_is_cut_short_is_told_before_another_is_read(sharded, unread, lost):
    last = FolderCheckpoint(sharded).files()[-1]
    last.write_bytes(last.read_bytes()[:-lost])
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(last.name)} is damaged or no safetensors file .*download it again"
    ):
        load(sharded)


def test_a_header_that_claims_gigabytes_is_refused_at_once(sharded, unread):
    last = FolderCheckpoint(sharded).files()[-1]
    last.write_bytes(struct.pack("<Q", 2**40) + last.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=rf"{re.escape(last.name)} is damaged"):
        load(sharded)


def test_an_index_of_gigabytes_is_not_read(sharded, unread):
    with (sharded / INDEX).open("r+b") as file:
        file.truncate(folders.MOST_HEADER_BYTES + 1)  # a hole: it takes no room
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read .*100,000,001 bytes.*download it again"):
        load(sharded)


def test_an_index_that_names_a_tensor_in_another_file_is_told(sharded, unread):
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    held, other = index[LAST], next(name for name in index.values() if name != index[LAST])
    edit_json(sharded / INDEX, weight_map=index | {LAST: other})
    said = rf"names {re.escape(LAST)} in {re.escape(other)}, which does not hold it, but {re.escape(held)} does; download"
    with pytest.raises(CheckpointError, match=said):
        load(sharded)


def test_metas_own_folder_is_refused_with_the_way_out(sharded, tmp_path):
    original = sharded / "original"
    original.mkdir()
    (original / "consolidated.00.pth").write_bytes(b"a pickle")
    with pytest.raises(
        CheckpointError, match=rf"holds \.pth files of Meta's own layout.*: give {re.escape(str(sharded))} instead"
    ):
        read_config(original)
    (tmp_path / "alone").mkdir()
    (original / "consolidated.00.pth").rename(tmp_path / "alone" / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match=r"refimpl reads Hugging Face's, with config\.json and safetensors"):
        read_config(tmp_path / "alone")


def test_other_checkpoints_are_held_against_the_model_first_as_well(model, tmp_path, unread, monkeypatch):
    """A GGUF file by its header, a model in memory by what it has."""
    tensors = {"model.norm.weight": torch.ones(3)}
    in_memory = TransformersCheckpoint(model)
    monkeypatch.setattr(model, "state_dict", lambda: tensors)
    write_gguf(tmp_path / "model.gguf", random_llama(), without=("blk.0.ffn_norm.weight",))
    gguf = open_checkpoint(str(tmp_path / "model.gguf"))
    for checkpoint, said in ((in_memory, "misshapen: model.norm.weight"), (gguf, "missing: model.layers.0.post_attention")):
        views = build_model(TransformersCheckpoint(model).config, torch.float32, CPU).checkpoint_views()
        with pytest.raises(CheckpointError, match=said):
            copy_weights(checkpoint.weights(), views, checkpoint)


def test_outlines_are_what_comes(model, sharded, tmp_path):
    write_gguf(tmp_path / "model.gguf", model)
    for checkpoint in (
        FolderCheckpoint(sharded),
        TransformersCheckpoint(model),
        open_checkpoint(str(tmp_path / "model.gguf")),
    ):
        promised = [(name, tensor.shape, tensor.dtype) for name, tensor in checkpoint.outlines()]
        assert promised == [(name, tensor.shape, tensor.dtype) for name, tensor in checkpoint.weights()]
        assert len(promised) == 21


# ---------------------------------------------------------------------- told while it goes


class Terminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_a_large_model_has_a_bar_on_a_terminal_and_always_a_line_in_the_log(sharded, monkeypatch, caplog, capsys):
    caplog.set_level(logging.INFO, logger="refimpl")
    load(sharded)
    assert capsys.readouterr().err == ""
    [line] = [record.message for record in caplog.records if "of weights in" in record.message]
    assert re.fullmatch(r"sharded: 0\.\d\d GB of weights in \d+\.\d\d s \(\d+\.\d GB/s\)", line)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    load(sharded)
    assert terminal.text == "", "a small one has none"
    monkeypatch.setattr(progress, "LEAST_BYTES", 0)
    load(sharded)
    assert "loading sharded:" in terminal.text
    assert "B/s" in terminal.text


def test_a_load_that_fails_says_no_speed(sharded, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="refimpl")
    monkeypatch.setattr(loading, "fill", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load(sharded)
    assert not [record for record in caplog.records if "of weights in" in record.message]


# ---------------------------------------------------------------------- refimpl bench load


def test_bench_load_reads_what_it_wrote(tmp_path):
    shape = tmp_path / "shape"
    shape.mkdir()
    write_config(tiny().config, shape)
    asked = ["load", str(tmp_path / "shards"), "--model-config", str(shape), "--gib", "0.01", "--repeats", "1", "--json"]
    asked += ["--device", "cpu", "--dtype", "float32"]
    result = json.loads(CliRunner().invoke(bench, [*asked, "--quantization", "fp8"]).stdout)
    assert [(check["name"], check["bound"]) for check in result["checks"]] == [
        ("wrong_tensors", "<= 0"),
        ("peak_beside_in_shards", "<= 1.2"),
    ]
    assert result["checks"][0]["ok"]
    for row in (result["results"]["as_stored"], result["results"]["as_model"]):
        assert row["gb_per_second"] == pytest.approx(row["bytes"] / 1e9 / row["seconds"][0])
    files = FolderCheckpoint(tmp_path / "shards").files()
    assert len(files) >= 4
    eight = json.loads(CliRunner().invoke(bench, [*asked, "--stored", "float8_e4m3fn", "--cold"]).stdout)
    assert (list(eight["results"]), eight["checks"][0]["ok"]) == (["as_stored"], True)
    assert "files, cold" in eight["setting"]["workload"]
    result["results"]["as_model"] = {"not_measured": "interrupted"}
    table = report.TABLES["load"](result)
    assert re.search(
        r"\| as stored \| [\d.]+ \| [\d.]+–[\d.]+ \| [\d.]+ \|\n\| as model \| not measured: interrupted", table
    )


def test_the_same_shards_are_not_written_again(tmp_path):
    files = written_shards(tmp_path, tiny().config, torch.float32).files()
    written = [path.stat().st_mtime_ns for path in files]
    written_shards(tmp_path, tiny().config, torch.float32)
    assert [path.stat().st_mtime_ns for path in files] == written
    others = written_shards(tmp_path, tiny(hidden_size=32).config, torch.float32).files()
    assert others[0].stat().st_mtime_ns != written[0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gib", "1"], r"one layer with the embeddings takes 5\.\d+; raise gib"),
        (["--stored", "int8"], "stored 'int8'; they must be"),
        (["--repeats", "0"], "greater than or equal to 1"),
        ([], "holds something else; give one that is empty or not there"),
    ],
)
def test_bench_load_refuses_what_cannot_be(tmp_path, more, said):
    (tmp_path / "mine").write_text("do not touch")
    found = CliRunner().invoke(bench, ["load", str(tmp_path), "--device", "cpu", *more])
    told = str(found.exception) if isinstance(found.exception, ConfigError) else found.stderr
    assert re.search(said, told)
    assert (tmp_path / "mine").read_text() == "do not touch"


# ---------------------------------------------------------------------- room for what is to come


def test_a_draft_model_is_counted_before_anything_is_loaded(monkeypatch, unread):
    """On a CPU by its weights; the message has both sums."""
    target, draft = tiny(), tiny(seed=1)
    drafts = {"method": "draft_model", "model": draft, "num_speculative_tokens": 2}
    size = 8 * target.config.num_parameters
    monkeypatch.setattr("refimpl.executor.weights.free_host_memory", lambda: 2 * size - 1)
    with pytest.raises(OutOfMemoryError, match=r"and its draft model tiny has 0\.00 .*dtype=bfloat16 takes") as caught:
        LLM(target, dtype="float64", device="cpu", speculative_config=drafts)
    assert caught.value.numbers["needed"] == 2 * size
    monkeypatch.setattr("refimpl.executor.weights.free_host_memory", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match="Use a smaller model, or none that drafts, or use another device"):
        LLM(target, dtype="float64", device="cpu", speculative_config=drafts)


def test_a_draft_model_of_another_vocabulary_is_refused_before_anything_is_loaded(unread):
    other = dataclasses.replace(tiny(), config=dataclasses.replace(tiny().config, vocab_size=321))
    with pytest.raises(ConfigError, match="has 321 tokens, tiny has 320"):
        LLM("tiny", speculative_config={"method": "draft_model", "model": other})


def test_on_a_gpu_a_draft_model_is_counted_with_weights_and_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    args = EngineArgs(model="tiny", dtype="bfloat16", max_model_len=64)
    config = tiny().config
    drafts = ModelWeights(tiny(seed=1), CPU, 1)
    alone, both = (gpu_memory.before_loading(args, config, torch.bfloat16, CPU, draft) for draft in (None, drafts))
    assert both.weights == 2 * alone.weights == 4 * config.num_parameters
    assert both.block_bytes == 2 * alone.block_bytes
    [ours, theirs] = (next(each for each in sums.smaller if each.method == "fp8") for sums in (both, alone))
    assert ours.weights == theirs.weights + alone.weights, "a draft model is not quantised"


def test_shards_are_counted_as_what_they_hold(sharded):
    checkpoint = FolderCheckpoint(sharded)
    held = sum(tensor.nbytes for _, tensor in checkpoint.outlines())
    assert weight_bytes(checkpoint.config, PLAIN, 4) == held
    model = load_model(checkpoint, "auto", torch.bfloat16, CPU, 0, method=Fp8())
    layers = sum(weight.nbytes for layer in model.layers for name, weight in layer.named_parameters() if "norm" not in name)
    assert weight_bytes(checkpoint.config, Fp8(), 2) == layers + 2 * checkpoint.config.num_outside_matrices


def test_files_that_a_control_group_read_are_memory_that_it_may_still_take(tmp_path):
    """After 60 GiB of shards were read, a container of 64 is not full."""
    for name, text in {
        "memory.max": f"{64 * GIB}\n",
        "memory.current": f"{63 * GIB}\n",
        "memory.stat": f"anon {3 * GIB}\nfile {60 * GIB}\ninactive_file {50 * GIB}\nactive_file {9 * GIB}\nshmem {GIB}\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert devices._left_by_control_group(tmp_path) == 60 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert devices._left_by_control_group(tmp_path) > 2**60
    assert devices._left_by_control_group(tmp_path / "none") > 2**60
