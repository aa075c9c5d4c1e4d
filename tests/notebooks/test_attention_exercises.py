"""The checks of notebook 05's exercises: its own solutions pass, and every planted fault is found out."""

import importlib.util
import math
import sys

import nbformat
import pytest
import torch
from run_notebooks import FOLDER

from refimpl.errors import RefimplError
from refimpl.exercises import ExerciseError, check_paged_decode, check_partial_and_merge
from refimpl.kernels import attention_cases

NOTEBOOK = FOLDER / "05_attention.ipynb"
HEAD = "import math\nimport torch\nHAS_TRITON = True\n"


def cell(cell_id):
    [found] = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.get("id") == cell_id]
    return found.source


def module_of(source, path):
    """A file's names: Triton reads a kernel's source from its file."""
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def solutions(folder, *changes, name="solution"):
    """The notebook's solutions, with parts of their text replaced."""
    source = HEAD + cell("solutions")
    for old, new in changes:
        assert source.count(old) >= 1, old
        source = source.replace(old, new)
    launch = cell("check-b").partition("\n\nif not HAS_TRITON")[0]
    return module_of(f"{source}\n\n{launch}\n", folder / f"{name}.py")


# ---------------------------------------------------------------------- A


def test_the_solution_of_a_is_right(tmp_path):
    right = solutions(tmp_path)
    assert check_partial_and_merge(right.solution_partial, right.solution_merge).startswith("right, ")


A = {
    "no largest score is taken off": (
        "weights = torch.exp(scores - largest.masked_fill(largest == -math.inf, 0)[:, None])",
        "weights, largest = torch.exp(scores), 0 * largest.masked_fill(largest == -math.inf, 0)",
    ),
    "lse without the largest": ("largest + torch.log(total)\n\n\ndef", "torch.log(total)\n\n\ndef"),
    "scaled twice": ("query @ keys.T * scale)", "query @ keys.T * scale * scale)"),
    "no mask": ("(query @ keys.T * scale).masked_fill(~visible, -math.inf)", "(query @ keys.T * scale)"),
    "the largest over all rows": ("largest = scores.amax(1)", "largest = scores.amax().expand(len(query))"),
    "sums, not averages": ("weights @ values / total.masked_fill(total == 0, 1)[:, None]", "weights @ values"),
    "NaN where no key is seen": ("total.masked_fill(total == 0, 1)[:, None], largest", "total[:, None], largest"),
    "the query is changed": ("scores = (query @", "query.mul_(1 + 1e-12)\n    scores = (query @"),
    "what is visible is changed": (
        "    return weights @ values /",
        "    visible.fill_(False)\n    return weights @ values /",
    ),
    "a part is changed": (
        "(o1, lse1), (o2, lse2) = one, other",
        "(o1, lse1), (o2, lse2) = one, other\n    o1.mul_(1 + 1e-12)",
    ),
    "weights swapped": ("w1[:, None] * o1 + w2[:, None] * o2", "w2[:, None] * o1 + w1[:, None] * o2"),
    "the first lse is kept": ("return average, shift + torch.log(total)", "return average, lse1"),
    "a merge without the largest": ("largest = torch.maximum(lse1, lse2)", "largest = torch.zeros_like(lse1)"),
    "NaN of two empty parts": ("shift = largest.masked_fill(largest == -math.inf, 0)  # ", "shift = largest  # "),
    "a list for a pair": ("return average, shift + torch.log(total)", "return [average, shift + torch.log(total)]"),
}


@pytest.mark.parametrize("fault", A)
def test_a_fault_in_a_is_found_out(tmp_path, fault):
    wrong = solutions(tmp_path, A[fault])
    with pytest.raises(ExerciseError, match="keys"):
        check_partial_and_merge(wrong.solution_partial, wrong.solution_merge)


def test_an_answer_of_another_kind_is_told_what_is_wanted():
    with pytest.raises(ExerciseError, match=r"the answer is a Tensor; it must be a pair \(o, lse\)"):
        check_partial_and_merge(lambda query, *_: query, lambda a, b: a)
    with pytest.raises(ExerciseError, match=r"lse has shape \(1, 1\); it must be \(1,\)"):
        check_partial_and_merge(lambda query, *_: (query, query[:, :1]), lambda a, b: a)
    assert issubclass(ExerciseError, AssertionError)
    assert issubclass(ExerciseError, RefimplError)


# ---------------------------------------------------------------------- B


def twin(query, k_cache, v_cache, block_table, seq_lens, scale):
    lengths = {"cu_seqlens_q": torch.arange(len(query) + 1, dtype=torch.int32), "seqused_k": seq_lens}
    return attention_cases.twin(query, k_cache, v_cache, block_table, softmax_scale=scale, max_seqlen_q=1, **lengths)


def test_the_twin_passes_where_there_is_no_triton():
    assert check_paged_decode(twin).startswith("right, for 18 sequences")


@pytest.fixture
def interpreted():
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("the exercise is for the interpreter")


def test_the_solution_of_b_is_right(tmp_path, interpreted):
    right = solutions(tmp_path)
    assert check_paged_decode(right.launch(right.solution_kernel)).startswith("right, for 18 sequences")


B = {
    "the table is not read": ("tl.load(block_table + sequence * max_blocks + first // B).to(tl.int64)", "first // B + 1"),
    "the cache is changed": ("scores = tl.where", "tl.store(k_cache + places, k)\n            scores = tl.where"),
    "one key too few": ("length = tl.load(seq_lens + sequence)", "length = tl.load(seq_lens + sequence) - 1"),
    "one key too many": ("length = tl.load(seq_lens + sequence)", "length = tl.load(seq_lens + sequence) + 1"),
    "another group's keys": ("head // (HQ // HKV)", "head % HKV"),
    "scaled twice": ("tl.sum(k * q[None, :], 1) * scale", "tl.sum(k * q[None, :], 1) * scale * scale"),
    "values are not masked": ("tl.load(v_cache + places, mask=exists[:, None], other=0.0)", "tl.load(v_cache + places)"),
    "scores are not masked": ("tl.where(exists, tl.sum(k", "tl.where(offsets >= 0, tl.sum(k"),
    "no rescale": ("attended * rescale + tl.sum(weights[:, None] * v, 0)", "attended + tl.sum(weights[:, None] * v, 0)"),
    "no largest score": ("new_largest = tl.maximum(largest, tl.max(scores, 0))", "new_largest = tl.maximum(largest, 0.0)"),
    "the last block is left out": ("range(0, length, B)", "range(0, length - B + 1, B)"),
    "not divided": ("attended / total)", "attended)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", B)
def test_a_fault_in_b_is_found_out(tmp_path, interpreted, fault):
    wrong = solutions(tmp_path, B[fault])
    with pytest.raises(ExerciseError, match=r"a context of|changed one of its arguments"):
        check_paged_decode(wrong.launch(wrong.solution_kernel))


def test_numbers_that_are_read_where_they_may_not_be_are_called_so(tmp_path):
    def careless(query, k_cache, v_cache, block_table, seq_lens, scale):
        answer = twin(query, k_cache, v_cache, block_table, seq_lens, scale)
        answer[0, 0, 0] = math.nan
        return answer

    with pytest.raises(ExerciseError, match=r"a context of 1: out\[0\]\[0, 0\] is nan, .*0 · NaN is NaN"):
        check_paged_decode(careless)
    with pytest.raises(ExerciseError, match="is a list; it must be a tensor"):
        check_paged_decode(lambda *_: [])


# ---------------------------------------------------------------------- without triton

NEED_TRITON = ("attention_tiles", "attention_specs", "flash_attention", "paged_attention", "split_plan")


def test_the_notebook_runs_where_triton_is_not_installed(monkeypatch, capsys):
    for name in ("triton", *(f"refimpl.kernels.{kernel}" for kernel in NEED_TRITON)):
        monkeypatch.setitem(sys.modules, name, None)  # to import it fails, and there is no such package
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the notebook sets it
    names = {"importlib": importlib}
    for each in nbformat.read(NOTEBOOK, as_version=4).cells:
        if each.cell_type == "code" and each.get("id") != "setup":
            exec(each.source, names)
    said = capsys.readouterr().out
    assert said.count(": right") == 2
    assert "the kernels' torch twin ran in their place" in said
