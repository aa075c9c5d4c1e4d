"""The terminal's form: one letter a block, one glyph a step; and drawing it while the engine runs."""

import io
import json
import logging
import re
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from sharing_support import Driver

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.cli import main
from refimpl.events import SCHEMA_VERSION, EventLog, LogHeader
from refimpl.visualizers import watch as watching
from refimpl.visualizers.history import History
from refimpl.visualizers.palette import DARK, LIGHT
from refimpl.visualizers.terminal import CACHED, DECODES, END, FREE, NULL, PREEMPTION, render
from refimpl.visualizers.watch import watch

SIZE = {"width": 100, "height": 30, "colour": False}


def run(prompts=5, max_tokens=14, num_blocks=12, **options):
    """The log of a tiny engine, with chunks, waits, shared prefixes and preemptions where the pool is small."""
    sizes = {"block_size": 4, "num_gpu_blocks_override": num_blocks, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    engine = Engine(EngineArgs(model="tiny", async_scheduling=False, **sizes | options))
    drive(engine, prompts, max_tokens)
    engine.close()
    return engine.events


def drive(engine, prompts=3, max_tokens=8):
    for number in range(prompts):
        prompt = [*range(1, 6), *range(number + 1, number + 5)]
        engine.add_request(f"r{number}", prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()


@pytest.fixture(scope="module")
def history():
    history = History(run())
    assert any(record.preempted for record in history.records)
    assert any(record.prefix_hits for record in history.records)
    return history


def map_of(picture):
    """The block map's cells in one string, and the lines beside them."""
    lines = [line for line in picture.split("\n") if "│" in line]
    return "".join(re.search(r"│(\S*)", line).group(1) for line in lines)


def rows_of(picture):
    """The timeline: glyphs by letter."""
    lines = picture.split("\n")
    column = next(line.index("step", 1) for line in lines if "a column each" in line)
    found = [re.fullmatch(r"([A-Z]+(?:·\d)?) +?([ ─█▁▂▄▆▇▼═┄╂]+)", line[column:]) for line in lines]
    return {match.group(1): match.group(2) for match in found if match}


# ---------------------------------------------------------------------- blocks


def test_the_map_is_the_blocks_at_every_position(history):
    for position in range(-1, len(history)):
        state = history.state_at(position)
        cells = map_of(render(history, position, **SIZE))
        assert len(cells) == state.num_blocks + 1
        for block, cell in zip(map(state.block, range(state.num_blocks + 1)), cells, strict=True):
            if block.kind in ("null", "free", "cached"):
                assert cell == {"null": NULL, "free": FREE, "cached": CACHED}[block.kind]
            elif block.kind == "shared":
                assert cell == str(len(block.owners))
            else:
                letter = state.sequences[block.owners[0]].letter
                assert cell == (letter if block.fill == state.block_size else letter.lower())


def test_a_block_of_many_owners_is_a_plus():
    driver = Driver(num_blocks=80, max_num_seqs=12, max_num_batched_tokens=64)
    driver.add(range(8), n=11, max_tokens=3)
    driver.add(range(20, 28), n=1, max_tokens=3)
    driver.step()
    cells = map_of(render(History(driver.recorder.events), 0, **SIZE))
    assert cells.count("+") == 2
    assert "B" in cells


def test_a_pool_that_is_too_large_is_condensed_and_says_so():
    driver = Driver(num_blocks=20_000, max_num_batched_tokens=64)
    driver.add(range(40), max_tokens=2)
    driver.step()
    picture = render(History(driver.recorder.events), 0, **SIZE)
    assert len(picture.split("\n")) <= SIZE["height"]
    said = int(re.search(r"a cell stands for (\d+) blocks", picture).group(1))
    cells = map_of(picture)
    assert len(cells) == -(-20_001 // said)
    assert cells[0] == "a", "blocks in use are not averaged away"
    assert set(cells[1:]) == {FREE}


# ---------------------------------------------------------------------- time


def test_a_row_is_what_each_step_did(history):
    rows = rows_of(render(history, len(history) - 1, width=200, height=30, colour=False))
    assert list(rows) == ["A", "B", "C", "D", "E"]
    ids = {arrival.sequence_ids[0]: "ABCDE"[i] for i, arrival in enumerate(a for r in history.records for a in r.arrived)}
    for column, record in enumerate(history.records):
        for preemption in record.preempted:
            assert rows[ids[preemption.sequence_id]][column] == PREEMPTION
        for sequence_id in record.sequence_ids:
            assert rows[ids[sequence_id]][column] in "█" + DECODES
        for finish in record.finished:
            assert rows[ids[finish.sequence_id]][column + 1] == END
    assert rows["E"].startswith("─")
    for glyphs in rows.values():
        assert glyphs.strip().endswith(END)
        assert re.search(r"▼[^┄█]", glyphs) is None, "after a preemption it is queued again"


def test_a_picture_of_the_past_knows_nothing_of_later(history):
    for position in range(0, len(history), 3):
        then, alone = (render(h, position, **SIZE) for h in (history, part(history, 0, position + 1)))
        assert re.sub(r" of \d+ · ", " · ", then, count=1) == re.sub(r" of \d+ · ", " · ", alone, count=1)


def part(history, first, last=None):
    """A history of some of the records."""
    log = EventLog(LogHeader(SCHEMA_VERSION, "0", 0.0, "monotonic", history.config), len(history))
    log.records.extend(history.records[first:last])
    return History(log)


def test_rows_that_do_not_fit_are_counted_those_that_run_stay():
    history = History(run(num_blocks=60, prompts=30, max_tokens=9))
    for position in (0, 8, len(history) - 1):
        picture = render(history, position, width=100, height=14, colour=False)
        assert len(picture.split("\n")) <= 14
        rows = rows_of(picture)
        running = [s.letter for s in history.state_at(position).alive() if s.phase == "running"]
        assert set(running) <= set(rows)
    picture = render(history, 0, width=100, height=14, colour=False)
    left_out = int(re.search(r"and (\d+) more sequences", picture).group(1))
    assert left_out + len(rows_of(picture)) == len(history.state_at(0).alive()) == 30


def test_samples_have_rows_of_their_own_and_one_letter():
    driver = Driver(num_blocks=40)
    driver.add(range(8), n=3, max_tokens=6)
    driver.step()
    picture = render(History(driver.recorder.events), 0, **SIZE)
    assert rows_of(picture).keys() == {"A·0", "A·1", "A·2"}
    assert map_of(picture) == NULL + "33" + 38 * FREE
    driver = Driver(num_blocks=40)
    driver.add(range(6), n=3, max_tokens=6)
    for _ in range(2):
        driver.step()
    history = History(driver.recorder.events)
    alive = [s for s in history.last.alive() if s.table]
    assert len(history.records[1].copies) > 0
    assert map_of(render(history, 1, **SIZE)).count("a") == len(alive)


# ---------------------------------------------------------------------- words, sizes, colours


def test_the_header_and_the_reasons_are_the_engines(history):
    for position in range(0, len(history), 4):
        state, record = history.state_at(position), history.records[position]
        first, *lines = render(history, position, width=150, height=30, colour=False).split("\n")
        counts = state.counts()
        assert first.startswith(f"step {record.step} of {history.records[-1].step} · ")
        used = counts["owned"] + counts["shared"]
        assert f"{used} of 12 blocks used, {counts['cached']} cached, {counts['free']} free" in first
        reasons = "\n".join(lines)[("\n".join(lines)).index("Why? ") :]
        assert len(reasons.split("\n")) <= 4
        for who, what in state.sentences()[:1] if len(state.sentences()) == 1 else []:
            assert f"{who} {what}" in reasons


@pytest.mark.parametrize(("width", "height"), [(20, 5), (40, 10), (80, 24), (200, 60)])
def test_a_picture_fits_its_terminal(history, width, height):
    for position in (-1, 0, 7, len(history) - 1):
        lines = render(history, position, width, False, height).split("\n")
        assert max(map(len, lines)) <= max(width, 24)
        assert len(lines) <= max(height, 10)


def test_no_requests_yet(history):
    picture = render(history, -1, **SIZE)
    assert picture.startswith("no step yet · all 12 blocks free")
    assert "no requests yet" in picture
    assert "Why? Nothing has run yet." in picture


def test_a_log_that_lost_its_beginning_is_drawn_and_says_so(history):
    cut = part(history, 9)
    for position in range(len(cut)):
        picture = render(cut, position, width=220, height=30, colour=False)
        assert "what ran before this log began is not known" in picture.split("\n")[0]


def test_colour_says_the_same_again(history, monkeypatch):
    for position in (3, len(history) // 2):
        plain = render(history, position, **SIZE)
        coloured = render(history, position, width=100, height=30, colour=True)
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    first = render(history, 0, width=100, height=30, colour=True)
    assert "\x1b[48;2;69;99;199;38;2;255;255;255m" in first, "A's ground is the first hue"
    monkeypatch.setenv("COLORFGBG", "0;15")
    ground = ";".join(str(int(LIGHT["h0"][i : i + 2], 16)) for i in (1, 3, 5))
    assert f"48;2;{ground}" in render(history, 3, width=100, height=30, colour=True)
    assert LIGHT["h0"] != DARK["h0"]


def test_colour_is_for_terminals_without_no_color(history, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in render(history, 3, 100, None, 30)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in render(history, 3, 100, None, 30)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert "\x1b[" not in render(history, 3, 100, None, 30)


# ---------------------------------------------------------------------- live


def make_engine():
    sizes = {"block_size": 4, "num_gpu_blocks_override": 20, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    return Engine(EngineArgs(model="tiny", **sizes))


def test_a_terminal_is_left_with_the_last_picture():
    engine, screen = make_engine(), io.StringIO()
    console = Console(file=screen, force_terminal=True, width=90, height=24, no_color=True)
    with watch(engine.events, console):
        drive(engine)
    expected = render(History(engine.events), 10**6, 89, False, 23)
    shown = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).splitlines()]
    tail = [line.rstrip() for line in expected.split("\n")]
    assert shown[-len(tail) :] == tail
    engine.close()


def test_what_is_no_terminal_gets_the_last_picture_alone():
    engine, file = make_engine(), io.StringIO()
    with watch(engine.events, Console(file=file, width=90, height=24)):
        drive(engine)
        assert file.getvalue() == ""
    assert file.getvalue().rstrip("\n") == render(History(engine.events), 10**6, 89, False, 23)
    assert not [thread for thread in threading.enumerate() if thread.name == "refimpl-watch"]
    engine.close()


def test_drawing_never_holds_a_step_up(monkeypatch):
    """While a frame is being drawn, and takes as long as it likes, steps go on."""
    drawing, go_on = threading.Event(), threading.Event()

    def slow(*arguments, **options):
        drawing.set()
        assert go_on.wait(240)
        return "picture"

    monkeypatch.setattr(watching, "render", slow)
    engine = make_engine()
    with watch(engine.events, Console(file=io.StringIO(), force_terminal=True, width=90, height=24)):
        engine.add_request("first", [1, 2, 3], SamplingParams(max_tokens=2))
        engine.step()
        assert drawing.wait(240)
        drive(engine)
        assert len(engine.events.records) > 5
        go_on.set()
    engine.close()


def test_frames_are_few(monkeypatch):
    frames = []
    monkeypatch.setattr(watching, "render", lambda *a, **o: (frames.append(time.monotonic()), "picture")[1])
    engine = make_engine()
    started = time.monotonic()
    with watch(engine.events, Console(file=io.StringIO(), force_terminal=True, width=90, height=24)):
        drive(engine, prompts=6)
    took = time.monotonic() - started
    assert len(frames) <= 2 + took * watching.MOST_FRAMES
    engine.close()


def test_a_picture_that_fails_does_not_fail_the_run(monkeypatch, caplog):
    def broken(*arguments, **options):
        raise RuntimeError("no picture")

    monkeypatch.setattr(watching, "render", broken)
    engine = make_engine()
    with (
        caplog.at_level(logging.WARNING),
        watch(engine.events, Console(file=io.StringIO(), force_terminal=True, width=90, height=24)),
    ):
        drive(engine)
    assert not engine.has_unfinished_requests()
    assert "the last picture could not be drawn" in caplog.text
    engine.close()


def test_the_log_is_let_go_also_when_the_block_raises():
    engine = make_engine()
    with pytest.raises(KeyboardInterrupt), watch(engine.events, Console(file=io.StringIO(), width=90, height=24)):
        raise KeyboardInterrupt
    assert engine.events._subscribers == []
    engine.close()


# ---------------------------------------------------------------------- the command


@pytest.fixture
def command(monkeypatch, capsys):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["refimpl", "generate", "--model", "tiny", "--max-tokens", "6", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        return exit.value.code or 0, captured.out, captured.err

    return command


def test_watch_draws_on_stderr_and_leaves_stdout_clean(command):
    code, out, err = command("--watch", "--json", "--ignore-eos", "--num-gpu-blocks-override", "30", "Hello", "Bye")
    assert code == 0
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["Hello", "Bye"]
    assert "step 5 " in err
    assert "Why? A ends after 6 output tokens: length" in err
    assert "█▁▁▁▁▁╂" in err
    _, without, nothing = command("--json", "--ignore-eos", "--num-gpu-blocks-override", "30", "Hello", "Bye")
    assert [json.loads(line)["outputs"] for line in out.splitlines()] == [
        json.loads(line)["outputs"] for line in without.splitlines()
    ]
    assert nothing == ""


def test_watch_works_without_an_event_log(command):
    code, out, err = command("--watch", "--json", "--event-log-size", "0", "Hello")
    assert code == 0
    assert len(out.splitlines()) == 1
    assert "█" in err
