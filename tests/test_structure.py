"""The shape of the code, read from its source: who imports whom, what is public, how long things are."""

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import refimpl

ROOT = Path(refimpl.__file__).parent
MAX_LINES = 350
MAX_FUNCTION_LINES = 60

LAYERS = [
    {
        "errors",
        "shapes",
        "cache_folder",
        "rope_config",
        "quantization_config",
        "model_config",
        "model_shares",
        "speculative_config",
        "field_checks",
        "beam_params",
        "beam_group",
        "config",
        "sampling_params",
        "sampling_numbers",
        "logprobs",
        "request_metrics",
        "row_extras",
        "request",
        "outputs",
        "events",
        "decision_texts",
        "memory_report",
        "tile_records",
    },
    {"cache", "scheduler", "tokenizer", "kernels"},
    {"attention", "quantization", "layers", "ranks"},
    {"models", "loading"},
    {"sampling", "speculative"},
    # Executors, and what drives any of them: the loop of steps, and who writes down what happened.
    {"executor", "step_loop", "step_pace", "recorder", "simulate", "parallel"},
    # The engine and its own helpers.
    {
        "engine",
        "beam_endings",
        "beam_intake",
        "engine_lock",
        "explain",
        "gate",
        "intake",
        "interrupts",
        "logprob_output",
        "output_processor",
        "parts",
        "request_book",
        "sampling_intake",
    },
    {"llm", "async_llm", "step_thread", "watchdog", "comm_messages", "closing"},
    {
        "server",
        "bench",
        "quantize",
        "speculate",
        "cli",
        "cli_options",
        "cli_checks",
        "cli_output",
        "cli_prompts",
        "cli_simulate",
        "cli_speculative",
        "chat",
        "chat_command",
        "doctor",
        "exercises",
        "claims",
        "lab",
        "__main__",
    },
]
"""Imports go from a later layer to an earlier one, or within one."""

STRANGERS = {
    "cache": {"tokenizer"},
    "scheduler": {"tokenizer", "kernels"},
    "tokenizer": {"cache", "scheduler", "kernels"},
}
"""Parts of one layer that know nothing of each other."""

TORCH_FREE = ["cache", "scheduler", *LAYERS[0]]
WITH_TENSORS = {f"cache.{name}" for name in ("kv_cache", "block_moves", "host_blocks", "staged_blocks", "pinned", "streams")}
"""The tensors behind the block ids, in the torch-free parts; these alone may ask for kernels there."""

LONGER_FILES: dict[str, tuple[int, str]] = {}
LONGER_FUNCTIONS: dict[str, tuple[int, str]] = {}


@cache
def files():
    """Every file of the package; kernels and visualizers are behind links. What lies beside the notebooks is none of it."""
    found = [Path(folder) / name for folder, _, names in os.walk(ROOT, followlinks=True) for name in names]
    return sorted(path for path in found if path.suffix == ".py" and part_of(path) != "notebooks")


def name_of(path):
    """``cache/block_pool.py`` as ``cache.block_pool``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def part_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(node):
    """What stands directly within a node, but for expressions: they define and import nothing."""
    return (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))


@cache
def imports(path):
    """Every module that a file imports, anywhere in it but under TYPE_CHECKING: (line, dotted name)."""
    found = []

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "refimpl" else [node.module]
            found.extend((node.lineno, name) for name in names)
        for child in statements(node):
            visit(child)

    visit(tree(path))
    return found


def ours(path):
    """The parts of refimpl that a file imports: (line, part)."""
    return [(line, name.split(".")[1]) for line, name in imports(path) if name.startswith("refimpl.")]


def layer(part):
    for number, parts in enumerate(LAYERS):
        if part in parts:
            return number
    raise AssertionError(f"refimpl.{part} has no place in LAYERS: say what it may import")


def inner_files():
    return [path for path in files() if part_of(path) not in ("__init__", "visualizers")]


def test_imports_go_one_way():
    wrong = []
    for path in inner_files():
        part = part_of(path)
        for line, imported in ours(path):
            if imported == "visualizers":
                allowed = part in ("cli", "server", "doctor", "bench")  # who shows them, looks for them, measures them
            elif imported == part:
                allowed = True
            elif imported == "kernels" and part in TORCH_FREE:
                allowed = name_of(path) in WITH_TENSORS
            else:
                allowed = layer(imported) <= layer(part) and imported not in STRANGERS.get(part, ())
            if not allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports refimpl.{imported}")
    assert wrong == []


def test_files_do_not_import_in_circles():
    graph = {}
    modules = {name_of(path) for path in files()}
    for path in files():
        targets = set()
        for _, name in imports(path):
            name = name.removeprefix("refimpl.")
            while name and name not in modules and f"{name}.__init__" not in modules:
                name = name.rpartition(".")[0]
            if name:
                targets.add(name if name in modules else f"{name}.__init__")
        graph[name_of(path)] = targets
    done, walking = set(), []

    def walk(name):
        assert name not in walking, " → ".join([*walking[walking.index(name) :], name])
        if name not in done:
            walking.append(name)
            for target in sorted(graph[name]):
                if name.rpartition(".")[0] + ".__init__" != target:  # a package's own __init__ is loaded first anyway
                    walk(target)
            walking.pop()
            done.add(name)

    for name in sorted(graph):
        walk(name)


def test_kernels_import_torch_jaxtyping_errors_and_where_things_are_kept():
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        allowed = {"torch", "jaxtyping", "refimpl", *sys.stdlib_module_names}
        if path.stem not in ("spec", "reference", "philox", "transfer"):
            allowed.add("triton")
        for line, name in imports(path):
            assert name.split(".")[0] in allowed, f"{path}:{line} imports {name}"
        assert {part for _, part in ours(path)} <= {"errors", "cache_folder", "kernels"}, path


def test_kernels_have_no_init():
    """With one, a repository root on the path would shadow the package ``kernels`` that transformers looks for."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_visualizers_know_what_happened_and_nothing_of_the_engine():
    for path in (ROOT / "visualizers").rglob("*.py"):
        assert {part for _, part in ours(path)} <= {
            "errors",
            "events",
            "decision_texts",
            "outputs",
            "memory_report",
            "tile_records",
            "visualizers",
        }, path


def test_only_known_packages_are_imported_at_the_top():
    """What the engine needs to be imported; everything else is imported where it is used."""
    known = {
        "torch",
        "numpy",
        "msgspec",
        "jaxtyping",
        "tqdm",
        "typer",
        "rich",
        "tokenizers",
        "refimpl",
        *sys.stdlib_module_names,
    }
    for path in inner_files():
        if part_of(path) in ("kernels", "server", "bench"):
            continue
        for node in tree(path).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in known, f"{path.relative_to(ROOT)}:{node.lineno} imports {name} at its top"


# ---------------------------------------------------------------------- in a process of their own

BLOCKER = """
import sys
from importlib.abc import MetaPathFinder

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_without(blocked, code):
    program = f"BLOCKED = {blocked!r}\n{BLOCKER}\n{code}"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cache_and_scheduler_need_no_torch():
    names = [name_of(path).removesuffix(".__init__") for path in inner_files() if part_of(path) in TORCH_FREE]
    names = [name for name in names if name not in WITH_TENSORS]
    code = "".join(f"import refimpl.{name}\n" for name in names)
    run_without({"torch", "numpy", "transformers", "tokenizers", "jaxtyping"}, code + "print(refimpl.SamplingParams())")


def test_the_engine_runs_with_few_packages():
    """No reader of checkpoints, nothing of the tests, no triton; and the tiny model not even transformers."""
    blocked = {
        "gguf", "safetensors", "transformers", "huggingface_hub", "beartype", "triton", "hypothesis", "pytest", "pandas",
        "scipy", "IPython", "ipywidgets", "anywidget", "fastapi", "uvicorn", "matplotlib",
    }  # fmt: skip
    code = (
        "import refimpl\n"
        "for name in refimpl.__all__: getattr(refimpl, name)\n"
        "with refimpl.LLM('tiny') as llm:\n"
        "    [output] = llm.generate('Hello', refimpl.SamplingParams(max_tokens=3), use_tqdm=False)\n"
        "print(len(output.outputs[0].token_ids))"
    )
    assert run_without(blocked, code) == "3\n"


# ---------------------------------------------------------------------- what is public


def test_every_public_name_resolves():
    assert refimpl.__all__ == sorted(refimpl.__all__, key=lambda name: (not name.isupper(), name))
    assert set(refimpl.__all__) == set(refimpl._HOMES)
    assert dir(refimpl) == sorted(refimpl.__all__)
    for name in refimpl.__all__:
        assert getattr(refimpl, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        refimpl.Llm  # noqa: B018


def test_type_checkers_see_the_same_names():
    [block] = [node for node in tree(ROOT / "__init__.py").body if isinstance(node, ast.If)]
    declared = {alias.name: node.module for node in block.body for alias in node.names}
    assert declared == refimpl._HOMES


@cache
def definitions_of(path):
    """Classes and functions of a file, nested ones too: (qualified name, node)."""
    return list(definitions(tree(path)))


def definitions(node, prefix=""):
    """The same of a node, one after the other."""
    for child in statements(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{child.name}"
            yield name, child
            yield from definitions(child, f"{name}.")
        else:
            yield from definitions(child, prefix)


def test_everything_public_has_a_docstring():
    without = []
    for path in files():
        if not ast.get_docstring(tree(path)):
            without.append(str(path.relative_to(ROOT)))
        functions = {name for name, node in definitions_of(path) if not isinstance(node, ast.ClassDef)}
        for name, node in definitions_of(path):
            local = any(name.startswith(f"{function}.") for function in functions)
            if not local and not any(part.startswith("_") for part in name.split(".")) and not ast.get_docstring(node):
                without.append(f"{path.relative_to(ROOT)}: {name}")
    assert without == []


def test_nobody_reads_what_an_engine_or_its_host_keeps_to_itself():
    """Objects that go by these names, wherever they are kept: ``self.engine``, ``replica.llm``."""
    read = []
    for path in files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
                if owner in ("engine", "llm", "async_llm"):
                    read.append(f"{path}:{node.lineno} reads {owner}.{node.attr}")
    assert read == []


# ---------------------------------------------------------------------- how long things are


def test_files_are_short():
    too_long = []
    for path in files():
        name, lines = str(path.relative_to(ROOT)), len(path.read_text(encoding="utf-8").splitlines())
        limit, _reason = LONGER_FILES.get(name, (MAX_LINES, ""))
        if lines > limit:
            too_long.append(f"{name} has {lines} lines, over {limit}")
    assert too_long == []


def test_functions_are_short():
    too_long = []
    for path in files():
        for name, node in definitions_of(path):
            where, lines = f"{path.relative_to(ROOT)}: {name}", node.end_lineno - node.lineno + 1
            limit, _reason = LONGER_FUNCTIONS.get(where, (MAX_FUNCTION_LINES, ""))
            if not isinstance(node, ast.ClassDef) and lines > limit:
                too_long.append(f"{where} has {lines} lines, over {limit}")
    assert too_long == []


def test_exceptions_are_still_needed():
    for name in LONGER_FILES:
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) > MAX_LINES, f"{name} is short enough"
    assert LONGER_FUNCTIONS.keys() <= {f"{p.relative_to(ROOT)}: {n}" for p in files() for n, _ in definitions_of(p)}


def test_the_step_is_a_paragraph():
    [step] = [node for name, node in definitions_of(ROOT / "engine.py") if name == "Engine.step"]
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(step)) <= 17


def test_no_wildcard_and_no_print_in_the_engine():
    for path in inner_files():
        for node in ast.walk(tree(path)):
            assert not (isinstance(node, ast.ImportFrom) and node.names[0].name == "*"), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                assert part_of(path) in ("cli", "cli_simulate", "bench", "server") or name_of(path) == "loading.pull", (
                    f"{path}:{node.lineno}"
                )
