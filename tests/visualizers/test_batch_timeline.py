"""BatchTimeline: its numbers are the requests' own, its window stays small, and its sentences are the scheduler's."""

import itertools
import json
from functools import cache
from xml.etree import ElementTree

import pytest

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.decision_texts import describe
from refimpl.events import SCHEMA_VERSION, ArrivalRecord, EventLog, LogHeader, StepRecord
from refimpl.visualizers.batch_timeline import FIGURE, MOST_ROWS, SHOWN, columns_in, ticks, window
from refimpl.visualizers.figure import Look, plain
from refimpl.visualizers.history import History
from refimpl.visualizers.palette import DARK, LIGHT
from refimpl.visualizers.timeline_books import Column
from refimpl.visualizers.timeline_rows import Timeline
from refimpl.visualizers.timeline_runs import DECODE, PADDING, PREFILL, WAITING

CONFIG = {"block_size": 4, "num_blocks": 50, "max_num_batched_tokens": 64, "max_num_seqs": 4}
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["depth 0", "depth 1"])


def run(overlap=False, num_requests=6, **options):
    """A tiny engine with chunks, waits and preemptions: (its history, the last output of each request)."""
    sizes = {"block_size": 4, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 16, "max_num_seqs": 4} | options
    clock = map(float, itertools.count())
    engine = Engine(EngineArgs(model="tiny", async_scheduling=overlap, **sizes), clock=lambda: next(clock) / 1000)
    outputs = {}
    for step in itertools.count():
        if step < num_requests:
            params = SamplingParams(max_tokens=12 + step % 3, ignore_eos=True, n=2 if step == 1 else 1, seed=step)
            engine.add_request(f"r{step}", list(range(1, 5 + 3 * step)), params)
        elif not engine.has_unfinished_requests():
            break
        outputs |= {output.request_id: output for output in engine.step()}
    engine.close()
    return History(engine.events), outputs


def log_of(records, **config):
    log = EventLog(LogHeader(SCHEMA_VERSION, "test", 0.0, "virtual", CONFIG | config), capacity=len(records) + 1)
    log.records.extend(records)
    return History(log)


def rows_of(picture):
    return {row["letter"]: row for row in picture["rows"]}


def runs_of(row):
    return list(zip(*[iter(row["runs"])] * 5, strict=True))


@OVERLAP
def test_the_columns_at_the_right_are_the_requests_own_metrics(overlap):
    history, outputs = run(overlap)
    picture = FIGURE.picture(history, len(history) - 1)
    rows = rows_of(picture)
    assert len(rows) == 7
    for letter, output in zip("ABCDEF", outputs.values(), strict=True):
        for index, completion in enumerate(output.outputs):
            name = letter if len(output.outputs) == 1 else f"{letter}·{index}"
            assert rows[name]["tokens"] == len(completion.token_ids)
        first = rows.get(letter) or rows[f"{letter}·0"]
        assert first["first_token"] == pytest.approx(output.metrics.time_to_first_token, abs=0.02)
    assert (
        sum(len(row["preempted"]) for row in rows.values()) == sum(o.metrics.num_preemptions for o in outputs.values()) > 0
    )


@OVERLAP
def test_the_bands_are_the_records(overlap):
    history, _ = run(overlap)
    picture = FIGURE.picture(history, 3)
    computed = zip(*(picture["tokens"][kind] for kind in ("prefill", "decode", "padding")), strict=True)
    assert [sum(parts) for parts in computed] == [sum(record.num_new_tokens) for record in history.records]
    for position in range(len(history)):
        counts = history.state_at(position).counts()
        assert [picture["blocks"][kind][position] for kind in ("owned", "shared", "cached")] == [
            counts[kind] for kind in ("owned", "shared", "cached")
        ]


def test_the_caption_says_who_waited_how_long_and_for_what():
    history, outputs = run(max_num_seqs=2, num_gpu_blocks_override=60)
    picture = FIGURE.picture(history, len(history) - 1)
    waited = sum(row.sums(len(history))[0] for row in history.fold(Timeline).rows)
    assert f"{waited} steps in all: " in plain(picture["caption"])
    assert " for a slot" in plain(picture["caption"])
    assert [bold for _, bold in picture["caption"]] == [False, True, False]
    early = plain(FIGURE.picture(history, 0)["caption"])
    assert "none of 1 request waited." in early
    assert len(outputs) == 6


def test_at_rest_it_points_at_the_latest_wait_for_memory_with_the_schedulers_sentence():
    history, _ = run()
    told = [
        (position, decision)
        for position, record in enumerate(history.records)
        for decision in record.decisions
        if decision.kind in ("waits_blocks", "waits_watermark")
    ]
    assert told
    for position in range(len(history)):
        picture = FIGURE.picture(history, position)
        so_far = [decision for at, decision in told if at <= position]
        if not so_far:
            assert picture["tip"] is None
            continue
        tip = picture["tip"]
        assert tip["column"] <= position
        row = picture["rows"][tip["row"]]
        assert tip["text"] in [describe(decision) for decision in so_far]
        assert tip["text"] in [text for _, _, text in row["reasons"]]
        state = next(state for start, end, state, _, _ in runs_of(row) if start <= tip["column"] < end)
        assert picture["states"][state] in ("waiting", "queued")


def test_who_stands_behind_the_head_of_the_queue_finds_its_reason():
    history, _ = run(max_num_seqs=1, num_gpu_blocks_override=60, num_requests=3)
    picture = FIGURE.picture(history, 0)
    rows = rows_of(picture)
    holds = picture["holds"]
    assert [letter for _, _, letter, *_ in holds][:1] == ["B·0"]
    assert all(hold[3] == "waits: all 1 slots are taken" and not hold[5] for hold in holds)
    assert rows["C"]["reasons"][0][2].startswith("arrives with 10 prompt tokens")  # all that it was told itself
    for since, until, letter, _, told, _ in holds:
        assert told <= since
        if until is not None:
            waits = [run for run in runs_of(rows[letter]) if picture["states"][run[2]] == "waiting"]
            assert any(start <= since and end == until for start, end, *_ in waits)


def test_forks_are_bracketed_to_the_row_that_they_left():
    history, _ = run()
    rows = FIGURE.picture(history, 5)["rows"]
    child = next(row for row in rows if row["letter"] == "B·1")
    assert rows[child["parent"]]["letter"] == "B·0"
    assert history.records[child["forked"]].forks == ((1, 2),)
    assert (child["waited"], child["first_token"]) == (None, None)


def test_padding_of_a_static_batch_is_in_rows_and_bands():
    history, _ = run(scheduler="static", num_gpu_blocks_override=80)
    picture = FIGURE.picture(history, 0)
    padded = [row for row in picture["rows"] if PADDING in row["runs"][2::5]]
    assert padded
    assert all(row["end"] is not None for row in padded)
    assert sum(picture["tokens"]["padding"]) > 0


# ---------------------------------------------------------------------- windows, and many of everything


def test_a_window_shows_the_position_and_stays_while_it_moves():
    for length in (0, 1, 29, 31, 240, 241, 1000, 10_001):
        starts = set()
        for position in range(-1, length):
            first, columns = window(length, position)
            assert first <= max(0, position) < first + columns <= first + SHOWN
            assert first < max(1, length)
            starts.add(first)
        assert len(starts) <= 2 + length / 60
    assert window(10_000, 9_999) == (9_780, SHOWN)
    assert window(7, 6) == (0, 30)


def test_the_axis_has_a_number_where_steps_pass_a_multiple():
    columns = [Column(step, *[0] * 11, ()) for step in (7, 8, 9, 10, 11, 19, 22, 23, 30)]
    assert ticks(columns, 100, 10) == [[103, 10], [106, 22], [108, 30]]
    assert ticks(columns[3:], 0, 10) == [[0, 10], [3, 22], [5, 30]]


@cache
def many(num_waiting, num_steps, slots=4):
    """Requests that all arrive at once; ``slots`` of them decode all along."""
    ids = tuple(range(slots))
    arrived = tuple(ArrivalRecord(f"r{i}", (i,), (1,), ("x",)) for i in range(num_waiting))
    first = StepRecord(
        0, 0, 1, ids, ids, (1,) * slots, (5,) * slots, ("y",) * slots, arrived, admitted=tuple((i, i, 0) for i in ids)
    )
    later = [
        StepRecord(step, step, step + 1, ids, ids, (1,) * slots, (5,) * slots, ("y",) * slots)
        for step in range(1, num_steps)
    ]
    return log_of([first, *later])


@pytest.mark.parametrize("position", [0, 40, 499, 999])
def test_of_ten_thousand_requests_those_that_run_and_the_head_of_the_queue_are_sent(position, monkeypatch):
    history = many(10_000, 1_000)
    history.fold(Timeline)
    looked_at = []
    row_type = type(history.fold(Timeline).rows[0])
    monkeypatch.setattr(
        row_type, "at", lambda row, column, at=row_type.at: (looked_at.append(row.index), at(row, column))[1]
    )
    picture = FIGURE.picture(history, position)
    assert [row["letter"] for row in picture["rows"][:5]] == ["A", "B", "C", "D", "E"]
    assert len(picture["rows"]) == MOST_ROWS
    assert picture["num_hidden"] == 10_000 - MOST_ROWS
    assert len(set(looked_at)) < 10 * MOST_ROWS
    assert len(json.dumps(picture)) < 60_000
    assert picture["overview"]["num_rows"] == 10_000


def test_a_long_log_is_sent_as_a_window_and_an_overview():
    history = many(6, 2_000)
    picture = FIGURE.picture(history, 1_000)
    assert (picture["first"], picture["last"]) == (900, 1_140)
    assert picture["rows"][0]["runs"] == [900, 1_140, DECODE, 1, 0]
    assert picture["rows"][4]["runs"] == [900, 1_140, WAITING, 0, 0]
    assert picture["overview"]["lines"] == [[PREFILL, 1, DECODE, 249]] * 4 + [[WAITING, 250]] * 2
    assert (picture["overview"]["steps_per_bin"], picture["overview"]["length"]) == (8, 2_000)


def test_a_short_log_needs_no_overview():
    assert FIGURE.picture(many(6, SHOWN), 5)["overview"] is None


# ---------------------------------------------------------------------- what is not there, and without a browser


def test_before_everything_there_is_a_picture():
    picture = FIGURE.picture(log_of([]), -1)
    assert (picture["caption"], picture["rows"], picture["tip"]) == ([("No requests yet.", True)], [], None)
    history, _ = run(num_requests=2)
    before = FIGURE.picture(history, -1)
    assert "Before the first step." in plain(before["caption"])
    assert len(before["rows"]) == 3


def test_a_log_that_lost_its_beginning_says_so():
    history, _ = run()
    rest = log_of(history.records[4:])
    picture = FIGURE.picture(rest, 2)
    assert plain(picture["caption"]).startswith("The log begins in the middle of a run. Up to step 6, ")
    assert any(row["letter"].startswith("?") for row in picture["rows"])
    assert picture["steps"][0] == 4


@OVERLAP
def test_a_growing_log_gives_the_pictures_of_a_whole_one(overlap):
    history, _ = run(overlap)
    growing = log_of([], **history.config)
    for position, record in enumerate(history.records):
        growing.append(record)
        grown = FIGURE.picture(growing, position)
        whole = FIGURE.picture(log_of(history.records[: position + 1], **history.config), position)
        assert json.dumps(grown) == json.dumps(whole)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_the_svg_is_a_document_whose_label_is_the_caption(palette):
    history, _ = run()
    for picture in (
        FIGURE.picture(history, 7),
        FIGURE.picture(log_of([]), -1),
        FIGURE.picture(many(200, 900), 500),
        FIGURE.picture(run(scheduler="static", num_gpu_blocks_override=80)[0], 9),
    ):
        json.dumps(picture)
        root = ElementTree.fromstring(FIGURE.svg(picture, palette))
        assert root.tag.endswith("svg")
        assert root.get("aria-label") == plain(picture["caption"])
    texts = [element.text for element in ElementTree.fromstring(FIGURE.svg(FIGURE.picture(history, 20), palette)).iter()]
    assert {"A", "B·0", "B·1", "16 budget", "12 blocks", "preempted"} <= set(texts)


# ---------------------------------------------------------------------- what a view wants to see


def test_a_narrow_view_shows_fewer_columns_and_never_less_than_the_position():
    assert [columns_in(width) for width in (320, 600, 899, 900, 1216, 5_000)] == [60, 130, 200, 160, SHOWN, SHOWN]
    history = many(6, 2_000)
    for width in (320, 700, 1_000):
        for position in (0, 59, 61, 1_000, 1_999):
            picture = FIGURE.picture(history, position, Look(width))
            assert picture["columns"] == columns_in(width)
            assert picture["first"] <= position < picture["last"] <= picture["first"] + picture["columns"]


def test_a_pinned_request_is_among_the_rows_however_far_it_waits():
    history = many(10_000, 1_000)
    unpinned, pinned = FIGURE.picture(history, 40), FIGURE.picture(history, 40, Look(pinned="r9000"))
    names = [row["request"] for row in pinned["rows"]]
    assert "r9000" not in [row["request"] for row in unpinned["rows"]]
    assert names[-1] == "r9000"
    assert len(names) == MOST_ROWS
    assert pinned["num_hidden"] == unpinned["num_hidden"]


def test_who_waits_while_others_are_preempted_is_told_so():
    history, _ = run()
    assert any(record.preempted for record in history.records)
    told = [plain(FIGURE.picture(history, position)["caption"]) for position in range(len(history))]
    assert "for a step that preempts" in told[-1]
    assert not any("other reasons" in caption or "before this log" in caption for caption in told)


@pytest.mark.parametrize("row", range(6))
def test_the_sentence_at_a_wait_covers_none_of_the_charts_and_not_its_cell(row):
    """However few rows there are."""
    history, _ = run()
    picture = next(p for p in (FIGURE.picture(history, at) for at in range(len(history))) if p["tip"])
    few = picture | {"rows": (picture["rows"] * 6)[: row + 1], "tip": picture["tip"] | {"row": row}}
    root = ElementTree.fromstring(FIGURE.svg(few, LIGHT))
    boxes = [{k: float(e.get(k)) for k in ("y", "height")} for e in root.iter() if e.get("rx") == "3"]
    cells = [
        e for e in root.iter() if e.tag.endswith("rect") and e.get("fill") == "none" and e.get("stroke") == LIGHT["ink"]
    ]
    [tip], [cell] = boxes, [{k: float(e.get(k)) for k in ("y", "height")} for e in cells if e.get("rx") is None]
    title = next(float(e.get("y")) for e in root.iter() if e.text == "tokens" and e.get("font-weight") == "600")
    assert tip["y"] + tip["height"] <= title - 6
    assert tip["y"] >= cell["y"] + cell["height"] or tip["y"] + tip["height"] <= cell["y"]
