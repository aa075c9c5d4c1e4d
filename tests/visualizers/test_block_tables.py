"""BlockTables: the latest copy-on-write in three moments, checked against the manager's own books."""

import contextlib
import json
import random
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from prove import random_call, random_driver
from sharing_support import Driver

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.errors import RequestError
from refimpl.events import EventLog
from refimpl.visualizers.block_tables import FIGURE, HEAD, BlockTables
from refimpl.visualizers.block_tables_svg import layout
from refimpl.visualizers.copies import Copies
from refimpl.visualizers.figure import plain
from refimpl.visualizers.history import History
from refimpl.visualizers.palette import DARK, LIGHT
from refimpl.visualizers.state import State


def history_of(driver):
    return History(driver.recorder.events)


def forked(n=3, prompt=6, steps=2, **options):
    """A prompt with several samples, which share its blocks after one step and part in the next."""
    driver = Driver(num_blocks=60, max_num_batched_tokens=256, max_num_seqs=8, **options)
    driver.add(list(range(1, prompt + 1)), n=n, max_tokens=8)
    for _ in range(steps):
        driver.step()
    return driver


def entries(panel):
    return {table["letter"]: [block_id for _, block_id in table["entries"]] for table in panel["tables"]}


def references(panel):
    return {block["id"]: block["references"] for block in panel["blocks"]}


def test_the_three_moments_of_a_copy():
    driver = forked()
    history = history_of(driver)
    picture = FIGURE.picture(history, 1)
    before, copying, after = picture["panels"]
    assert entries(before) == entries(copying) == {f"A·{i}": [1, 2] for i in range(3)}
    target = picture["target"]
    assert entries(after) == {"A·0": [1, target], "A·1": [1, 2], "A·2": [1, 2]}
    assert references(before) == {1: 3, 2: 3, target: 0}
    assert references(after) == {1: 3, 2: 2, target: 1}
    assert [panel["title"] for panel in picture["panels"]] == [
        "After the fork: 3 tables, one set of blocks.",
        "A·0 must write slot 2 of block 2: 3 own it.",
        "Only one entry of one table changed.",
    ]
    assert copying["note"] == f"So take block {target} and copy 2 tokens into it."
    rings = [[block["ring"] for block in panel["blocks"]] for panel in picture["panels"]]
    assert rings == [[None] * 3, [None, "source", "copy"], [None, None, "copy"]]
    assert [block["fill"] for block in after["blocks"]] == [4, 2, 3]
    assert [table["hot"] for table in copying["tables"]] == [1, None, None]


def test_all_copies_of_a_step_are_counted_and_the_last_owner_writes_in_place():
    driver = forked()
    caption = plain(FIGURE.picture(history_of(driver), 1)["caption"])
    assert "2 copies of block 2, for A·0 and A·1; A·2, its last owner, keeps it" in caption
    assert "its writer A·0 pays it; 1 other block of its table stays shared" in caption
    counts = driver.kv.snapshot({}).ref_counts
    assert counts[2] == 1


def test_the_copied_tokens_and_what_each_owner_writes_next_to_them():
    driver = forked()
    picture = FIGURE.picture(history_of(driver), 1)
    assert picture["tokens"] == ["5", "6"]
    [request] = driver.requests.values()
    drawn = [str(sequence.output_token_ids[0]) for sequence in request.sequences]
    assert [entry["text"] for entry in picture["next"]] == drawn
    assert [entry["writes"] for entry in picture["next"]] == [True, False, False]


def test_a_fork_that_is_written_in_the_same_step_is_seen_as_a_fork():
    driver = Driver(num_blocks=40, max_num_batched_tokens=64)
    parent = driver.add([1, 2, 3, 4, 5, 6], max_tokens=9).sequences[0]
    for _ in range(2):
        driver.step()
    driver.fork(parent)
    driver.step()
    history = history_of(driver)
    assert history.records[-1].forks
    assert history.records[-1].copies
    picture = FIGURE.picture(history, len(history) - 1)
    before, _, after = picture["panels"]
    assert len({tuple(table) for table in entries(before).values()}) == 1
    assert sorted(entries(after)) == ["A", "B"]
    assert "hues" in before["blocks"][0]
    assert len(before["blocks"][0]["hues"]) == 2  # two requests


def test_the_latest_copy_stays_until_the_next_one():
    driver = forked(steps=2)
    driver.run()
    history = history_of(driver)
    copies = [position for position, record in enumerate(history.records) if record.copies]
    for position in range(len(history)):
        picture = FIGURE.picture(history, position)
        latest = max((copy for copy in copies if copy <= position), default=None)
        assert picture.get("step") == (None if latest is None else history.records[latest].step)


@pytest.mark.parametrize("seed", range(12))
def test_one_entry_of_one_table_changes_in_random_runs(seed):
    rng = random.Random(seed)
    driver = random_driver(rng)
    for _ in range(150):
        name, arguments = random_call(rng, driver)
        with contextlib.suppress(RequestError):
            getattr(driver, name)(**arguments)
    driver.run()
    history, figure = history_of(driver), BlockTables()
    positions = [position for position, record in enumerate(history.records) if record.copies]
    rng.shuffle(positions)  # jumps, there and back
    for position in positions:
        record, picture = history.records[position], figure.picture(history, position)
        copy = record.copies[0]
        before, _, after = picture["panels"]
        assert (picture["source"], picture["target"]) == (copy.source, copy.target)
        assert references(before)[copy.target] == 0
        assert references(after)[copy.source] == references(before)[copy.source] - 1 >= 1
        changed = [
            (a, b)
            for one, other in zip(before["tables"], after["tables"], strict=True)
            for a, b in zip(one["entries"], other["entries"], strict=True)
            if a != b
        ]
        assert changed == [([copy.index, copy.source], [copy.index, copy.target])]
        assert len(picture["tokens"]) == picture["slot"]
        json.dumps(picture)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_walk_from_copy_to_copy_is_the_histories_own_fold(depth):
    driver = Driver(num_blocks=30, depth=depth, max_num_batched_tokens=64, max_num_seqs=6)
    for number in range(6):
        driver.add(range(number, number + 6 + number), n=1 + number % 3, max_tokens=7)
    driver.run()
    history, copies = history_of(driver), Copies()
    positions = [position for position, record in enumerate(history.records) if record.copies]
    assert positions
    for position in positions:
        copies.before(history, position, lambda *_: None)
        walked, told = copies._state, history.state_at(position)
        assert {s.sequence_id: s.table for s in walked.alive()} == {s.sequence_id: s.table for s in told.alive()}
        assert [walked.block(b) for b in range(31)] == [told.block(b) for b in range(31)]


def test_playing_a_log_folds_each_record_a_few_times_at_most(monkeypatch):
    driver = Driver(num_blocks=60, max_num_batched_tokens=64, max_num_seqs=6)
    for number in range(90):
        driver.add([number % 5, 2, 3, 4, 5, 6], n=2, max_tokens=8)
    driver.run()
    history, figure, calls = history_of(driver), BlockTables(), []
    assert sum(bool(record.copies) for record in history.records) > 20
    apply = State.apply
    monkeypatch.setattr(State, "apply", lambda self, record: calls.append(1) or apply(self, record))
    for position in range(len(history)):
        history.state_at(position)
        figure.picture(history, position)
    assert len(calls) <= 4 * len(history)


def test_before_the_first_copy_up_to_four_tables_are_shown_those_that_share_first():
    driver = Driver(num_blocks=60, max_num_batched_tokens=64, max_num_seqs=8)
    driver.add([9, 8, 7], max_tokens=9)
    driver.add(range(1, 7), n=3, max_tokens=9)
    driver.add([5, 4, 3], max_tokens=9)
    driver.step()
    picture = FIGURE.picture(history_of(driver), 0)
    [panel] = picture["panels"]
    assert [table["letter"] for table in panel["tables"]] == ["B·0", "B·1", "B·2", "A"]
    snapshot = driver.kv.snapshot({})
    assert [[block_id for _, block_id in table["entries"]] for table in panel["tables"]] == [
        list(snapshot.tables[sequence_id]) for sequence_id in (1, 2, 3, 0)
    ]
    assert references(panel) == {block["id"]: snapshot.ref_counts[block["id"]] for block in panel["blocks"]}
    assert "no shared block was written yet" in plain(picture["caption"])
    assert "5 sequences with blocks, 4 drawn" in plain(picture["caption"])


def test_an_empty_log_says_so():
    driver = Driver()
    picture = FIGURE.picture(history_of(driver), -1)
    assert plain(picture["caption"]).startswith("No requests yet.")
    ET.fromstring(FIGURE.svg(picture, LIGHT))
    driver.add([1, 2, 3], max_tokens=1)
    driver.run()
    ended = FIGURE.picture(history_of(driver), 5)
    assert "No sequence holds a block" in plain(ended["caption"])


def test_a_log_that_lost_its_beginning_tells_what_it_knows():
    driver = forked(steps=1)
    driver.add([3, 1, 2, 1, 2, 1], n=2, max_tokens=4)
    driver.run()
    log = driver.recorder.events
    records = list(log.records)
    cut = EventLog(log.header, 1000)
    cut.records.extend(records[1:])
    history = History(cut)
    for position in range(-1, len(history)):
        picture = FIGURE.picture(history, position)
        ET.fromstring(FIGURE.svg(picture, LIGHT))
        if picture["kind"] == "copy":
            assert picture["panels"][0]["tables"][0]["name"]
            assert "not known" in plain(picture["caption"])


def test_long_tables_are_condensed_and_fit_with_wide_ids():
    driver = forked(n=6, prompt=170)
    picture = FIGURE.picture(history_of(driver), 1)
    for panel in picture["panels"]:
        assert all(len(table["entries"]) <= HEAD + 1 for table in panel["tables"])
        assert [table["length"] for table in panel["tables"]] == [43] * 4
    assert "4 of the 5 tables are drawn" in plain(picture["caption"])  # one sample ended at once
    text = json.dumps(picture["panels"][1])
    wide = json.loads(text)
    for table in wide["tables"]:
        table["entries"] = [[index, block_id + 99_000] for index, block_id in table["entries"]]
    for block in wide["blocks"]:
        block["id"] += 99_000
    for panel, width in ((picture["panels"][1], 384), (wide, 384), (wide, 278)):
        place = layout(panel, width)
        cells = [x for _, _, row in place["tables"] for _, _, x in row]
        assert max(cells) + place["cell"] <= width
        assert max(place["blocks"].values()) + place["block"] <= width + 0.001
        assert {picture["source"] % 99_000, picture["target"] % 99_000} <= {block % 99_000 for block in place["blocks"]}
        assert all(b - a >= place["block"] for a, b in pairwise(sorted(place["blocks"].values())))


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_the_svg_is_xml_and_says_its_caption(palette):
    engine = Engine(EngineArgs(model="tiny", block_size=4, num_gpu_blocks_override=60, max_num_batched_tokens=64))
    engine.add_request("a <&> \x07", "A story\n\x07 & <b>", SamplingParams(max_tokens=6, n=3, seed=1, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    history = History(engine.events)
    for position in range(-1, len(history)):
        picture = FIGURE.picture(history, position)
        root = ET.fromstring(FIGURE.svg(picture, palette))
        assert root.attrib["aria-label"] == plain(picture["caption"])
    assert picture["kind"] == "copy"
    engine.close()
