"""The notebooks run anew, say only what their cells computed, and are committed as they ran."""

import re
import sys
from pathlib import Path

import nbformat
import pytest
from run_notebooks import FOLDER, IN_A_BROWSER, LIVE, assert_checks_say_right, execute, normal, picture, texts

sys.path.insert(0, str(Path(__file__).parents[1] / "visualizers"))
from browser_support import MISSING

from refimpl.claims import all_claims

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 1_000_000
SECTIONS = ["Question", "Prediction", "Measurement", "Put right", "Misconceptions", "Exercises", "Your prediction"]
CLAIM = re.compile(r"^# claim: (.*)$")
USES_THE_EMBEDDED_MODEL = re.compile(r"LLM\((dtype|\))|\"smollm2\"")
MACHINE = re.compile(r"(?<![\w.])(/(home|root|tmp|work|usr|opt|var|Users|content|private)/|[A-Z]:\\\\)")

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_that_no_browser_runs = pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if MISSING or path.stem not in IN_A_BROWSER], ids=lambda path: path.stem
)


def read(path):
    return nbformat.read(path, as_version=4)


def code(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def prose(path):
    return "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")


def claims_of(path):
    """The ids of a notebook's claims, in order."""
    found = [CLAIM.match(cell.source.split("\n")[0]) for cell in code(path)]
    return [match[1] for match in found if match]


def tagged(path, tag):
    return [cell for cell in code(path) if tag in cell.metadata.get("tags", [])]


def test_there_are_notebooks():
    names = ["00_quickstart", "01_kv_cache", "02_fragmentation", "03_paged_attention", "04_continuous_batching"]
    names += ["05_attention", "06_speculation", "07_production", "08_the_numbers"]
    assert [path.stem for path in NOTEBOOKS][: len(names)] == names


def test_of_a_widget_its_picture_is_kept():
    kept = picture({LIVE: {"model_id": "gone"}, "text/html": "<p>a</p><svg>\n<rect/></svg>", "text/plain": "a"})
    assert set(kept) == {"text/html", "text/plain"}
    assert "svg>" not in kept["text/html"]
    assert kept["text/html"].startswith("<p>a</p><img ")
    assert picture(kept) == kept


@each_that_no_browser_runs
@pytest.mark.timeout(900)  # under a minute alone; the machine may be shared
def test_a_notebook_runs_from_top_to_bottom(path, request, tmp_path):
    if any(USES_THE_EMBEDDED_MODEL.search(cell.source) for cell in code(path)):
        request.getfixturevalue("smollm2")  # downloaded now, not in a cell
    assert_checks_say_right(execute(path, tmp_path))
    assert not list(tmp_path.iterdir()), "a notebook leaves no files"


@each
def test_it_is_committed_executed_in_its_normal_form_and_small(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < MAX_BYTES
    assert nbformat.writes(normal(read(path))) + "\n" == text, "run tests/notebooks/run_notebooks.py"
    cells = code(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error", cell.source
            assert output.get("name") != "stderr", f"a warning or a progress bar is in the outputs: {output.text}"


@each
def test_no_output_names_a_machine(path):
    for cell in code(path):
        for text in texts(cell):
            assert not MACHINE.search(text), MACHINE.search(text)


@each
def test_it_opens_with_what_a_reader_needs_to_know(path):
    title, *_ = read(path).cells
    assert title.source.startswith(f"# {path.stem[:2]} · ")
    assert f"https://colab.research.google.com/github/refimpl/refimpl/blob/main/notebooks/{path.name}" in title.source
    assert re.search(r"\*\*Minutes:\*\* \d+", title.source)
    assert "**Prerequisites:** " in title.source
    assert "CC BY 4.0" in title.source
    assert "Apache-2.0" in title.source
    install = read(path).cells[1]
    assert 'find_spec("refimpl") is None' in install.source


@each
def test_it_has_its_sections_in_order(path):
    sections = re.findall(r"^## (.*)$", prose(path), re.MULTILINE)
    positions = [sections.index(section) for section in ("Question", "Prediction", "Measurement")]
    assert positions == [0, 1, 2]
    assert sections[-1] == "Your prediction"
    assert set(SECTIONS) <= set(sections)


@each
def test_a_prediction_is_typed_first_and_shown_beside_the_measurement_at_the_end(path):
    [predict] = tagged(path, "prediction")
    assert re.match(r"prediction = [\d.]+", predict.source)
    last = code(path)[-1]
    assert "prediction" in last.source
    assert "measured" in last.source


@each
def test_solutions_are_in_one_folded_cell_and_every_exercise_is_checked(path):
    [solutions] = tagged(path, "solutions")
    assert solutions.metadata.jupyter.source_hidden
    exercises, checks = tagged(path, "exercise"), tagged(path, "check")
    assert len(exercises) == len(checks) >= 2
    assert all("yours instead" in cell.source for cell in exercises)


@each
def test_links_lead_to_files_that_are_copied_along(path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", prose(path)):
        assert (FOLDER / target).exists(), target


def test_every_claim_is_kept_and_made_once():
    made = [claim_id for path in NOTEBOOKS for claim_id in claims_of(path)]
    assert sorted(made) == sorted(set(made)), "a claim is made twice"
    assert set(made) == set(all_claims())
    for path in NOTEBOOKS:
        for cell in code(path):
            if match := CLAIM.match(cell.source.split("\n")[0]):
                assert f'check_claim("{match[1]}", ' in cell.source
            else:
                assert "check_claim(" not in cell.source, "a cell that holds a claim begins with its name"


def test_claims_are_printed_as_they_are_kept_now():
    """A bound or a derivation that was changed since is shown by no old output."""
    for path in NOTEBOOKS:
        shown = "".join(text for cell in code(path) for text in texts(cell))
        for claim_id in claims_of(path):
            claim = all_claims()[claim_id]
            assert f" {claim.unit} (claimed: {claim.demand}). {claim.because}\n" in shown, claim_id


def test_the_package_carries_the_notebooks():
    import refimpl

    assert (Path(refimpl.__file__).parent / "notebooks" / "00_quickstart.ipynb").is_file()
    assert not (FOLDER / "__init__.py").exists()
