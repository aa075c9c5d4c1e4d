"""Swap in every picture: whose blocks are on the host, which logical blocks those are, and when they went and came back."""

import contextlib
import json
import random
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from prove import random_call, random_driver
from sharing_support import Driver, expected_output
from test_state import assert_same

from refimpl.errors import RequestError
from refimpl.kernels.philox import ROOT_PATH, branch
from refimpl.visualizers import batch_timeline, block_map, block_tables, memory_view
from refimpl.visualizers.export import export_perfetto
from refimpl.visualizers.figure import plain
from refimpl.visualizers.figures import ALL
from refimpl.visualizers.frames import why
from refimpl.visualizers.history import History
from refimpl.visualizers.host_strip import MOST_LINES, lines
from refimpl.visualizers.palette import LIGHT
from refimpl.visualizers.state import State
from refimpl.visualizers.terminal import render
from refimpl.visualizers.timeline_rows import Timeline
from refimpl.visualizers.timeline_runs import DECODE, QUEUED, SWAPPED

SWAP = {"swap_space": 1.0, "preemption_mode": "swap", "num_host_blocks": 30}


def lasting(length, max_tokens, lasts):
    """A prompt that the shadow model answers at length; ``lasts`` says for a prompt and its answer whether others do too."""
    for number in range(1, 1_000):
        prompt = [3] * (length - 1) + [number]
        answer = expected_output(branch(ROOT_PATH, 0), prompt, max_tokens)
        if len(answer) == max_tokens and lasts(prompt, answer):
            return prompt
    raise AssertionError("no such prompt")


@pytest.fixture
def swapped():
    """A·0 and A·1, which share the two blocks of their prompt, are asked to give way; B goes on."""
    driver = Driver(20, 4, prefix_cache=False, **SWAP)
    prompt = lasting(8, 12, lambda prompt, _: len(expected_output(branch(ROOT_PATH, 1), prompt, 12)) == 12)
    both = driver.add(prompt, max_tokens=12, n=2)
    driver.add(lasting(6, 12, lambda *_: True), max_tokens=12)
    for _ in range(3):
        driver.step()
    driver.preempt(both, "swap")
    return driver


def history_of(driver):
    history = History(driver.recorder.events)
    driver.recorder.events.subscribe(history.append)
    return history


def first_swap(history):
    return next(position for position, record in enumerate(history.records) if record.swapped_out)


def test_the_map_shows_a_hollow_square_for_each_host_block_and_says_whose_it_is(swapped):
    history = history_of(swapped)
    assert block_map.FIGURE.picture(history, len(history) - 1)["host"]["cells"] == []
    swapped.step()
    picture = block_map.FIGURE.picture(history, first_swap(history))
    host, state = picture["host"], history.state_at(first_swap(history))
    assert host["used"] == len(host["cells"]) == state.swapped.num_used > 0
    assert {letter for _, letter, *_ in host["cells"]} >= {"×2"}, "the prompt's blocks are in two tables, once"
    assert f"{host['used']} of 30 blocks used, by A·0 and A·1" in plain(picture["caption"])
    assert "blocks hold running and swapped sequences" in plain(picture["caption"])
    drawn = block_map.FIGURE.svg(picture, LIGHT)
    assert "swap space on the host" in drawn
    assert drawn.count('fill="none" stroke="' + LIGHT["h0"]) == host["used"]


def test_without_a_swap_space_nothing_is_said_of_one():
    driver = Driver(20, 4)
    driver.add([3] * 8, max_tokens=3)
    driver.run()
    history = history_of(driver)
    picture = block_map.FIGURE.picture(history, 1)
    assert picture["host"] is None
    assert "wap" not in plain(picture["caption"])
    assert "swap" not in render(history, 1, width=200, height=30, colour=False).split("\n")[0]


def test_the_tables_say_which_logical_blocks_are_on_the_host():
    driver = Driver(20, 4, prefix_cache=False, **SWAP)
    child = branch(branch(ROOT_PATH, 0), 0)
    prompt = lasting(9, 12, lambda prompt, answer: len(expected_output(child, [*prompt, answer[0]], 9)) == 9)
    parent = driver.add(prompt, max_tokens=12)
    driver.step()
    driver.fork(parent.sequences[0], max_tokens=9)
    driver.step()
    driver.step()
    driver.preempt(parent, "swap")
    driver.step()
    history = history_of(driver)
    state = history.last
    [sequence_id] = state.swapped.tables
    assert state.swapped.held(sequence_id), "the fork uses the head of its table"
    [[letter, _, _, words]] = lines(state)
    assert letter == "A"
    assert words == "is swapped out: logical blocks 0 to 1 held here, which others use; logical block 2 on the host"
    picture = block_tables.FIGURE.picture(history, len(history) - 1)
    assert picture["swapped"] == lines(state)
    assert "is swapped out" in block_tables.FIGURE.svg(picture, LIGHT)
    assert {state.blocks.count(block_id) for _, block_id in state.swapped.held(sequence_id)} == {2}


def test_more_swapped_sequences_than_fit_are_counted():
    driver = Driver(60, 4, prefix_cache=False, max_num_seqs=8, max_num_batched_tokens=64, **SWAP)
    requests = [driver.add([3, number], max_tokens=30) for number in range(1, 9)]
    driver.step()
    for request in requests:
        driver.preempt(request, "swap")
    driver.step()
    history = history_of(driver)
    state = history.state_at(first_swap(history))
    told = lines(state)
    assert len(told) == MOST_LINES + 1
    assert told[-1][3] == f"and {len(state.swapped.tables) - MOST_LINES} more swapped sequences"


def test_the_timeline_is_swapped_until_it_comes_back_and_queued_when_its_blocks_are_dropped(swapped):
    history = history_of(swapped)
    swapped.step()
    swapped.step()
    timeline = history.fold(Timeline)
    at = first_swap(history)
    row = next(row for row in timeline.rows if row.letter == "A·0")
    assert row.preemptions == [at]
    assert row.at(at)[0] == SWAPPED
    assert row.at(at + 1)[0] == DECODE, "it goes on where it was"
    assert timeline.columns[at].on_host == history.state_at(at).swapped.num_used
    swapped.preempt(swapped.requests["0"], "swap")
    swapped.step()
    swapped.scheduler.drop_all_swapped()
    swapped.step()
    assert history.last.swapped.num_used == 0
    picture = batch_timeline.FIGURE.picture(history, len(history) - 1)
    assert picture["rows"]
    assert row.preemptions == [at, at + 2], "what is dropped was preempted before"
    assert QUEUED not in (row.at(at)[0], row.at(at + 2)[0])


def test_blocks_dropped_after_a_failed_step_are_in_the_log(swapped):
    history = history_of(swapped)
    swapped.step()
    assert history.last.swapped.tables
    swapped.scheduler.drop_all_swapped()
    assert swapped.scheduler.has_news
    swapped.step()
    assert {preemption.mode for preemption in history.records[-1].preempted} == {"recompute"}
    assert_same(history.last, swapped)
    swapped.run()
    assert_same(history.last, swapped)


def test_memory_terminal_and_reasons_tell_the_swap_space(swapped):
    history = history_of(swapped)
    swapped.step()
    at = first_swap(history)
    used = history.state_at(at).swapped.num_used
    said = plain(memory_view.FIGURE.picture(history, at)["caption"])
    assert f"Swap space: {used} of 30 blocks used, by A·0 and A·1." in said
    assert f"{used} of 30 in swap" in render(history, at, width=200, height=30, colour=False).split("\n")[0]
    assert any("is preempted (swap)" in what for _, what in why(history, at))
    swapped.step()
    assert any("comes back from swap" in what for _, what in why(history, len(history) - 1))


def test_a_trace_counts_the_swap_space_and_what_moves(swapped, tmp_path):
    history = history_of(swapped)
    swapped.run()
    export_perfetto(history, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    moved = [event["args"] for event in events if event["name"] == "blocks swapped"]
    assert sum(args["out"] for args in moved) == sum(len(record.swapped_out) for record in history.records) > 0
    assert sum(args["in"] for args in moved) == sum(args["out"] for args in moved)
    used = [event["args"]["used"] for event in events if event["name"] == "swap space"]
    assert used == [history.state_at(position).swapped.num_used for position in range(len(history))]
    assert "preempted, swapped out" in {event["name"] for event in events}


@pytest.mark.parametrize("seed", range(12))
def test_every_figure_draws_every_step_of_random_walks_with_swap(seed):
    rng = random.Random(f"pictures {seed}")
    driver = random_driver(rng)
    while not driver.kv.swap.num_blocks:
        driver = random_driver(rng)
    for _ in range(60):
        name, arguments = random_call(rng, driver)
        with contextlib.suppress(RequestError):
            getattr(driver, name)(**arguments)
    driver.run()
    history = History(driver.recorder.events)
    for position in range(-1, len(history), 3):
        for figure in ALL:
            picture = figure.picture(history, position)
            ET.fromstring(figure.svg(picture, LIGHT))
        assert render(history, position, width=120, height=30, colour=False)
        state = history.state_at(position)
        kept = State.of(state.keep())
        assert kept.swapped.owners() == state.swapped.owners()
        assert [kept.block(b) for b in range(state.num_blocks + 1)] == [state.block(b) for b in range(state.num_blocks + 1)]
        assert kept.fills().tolist() == [kept.block(b).fill for b in range(state.num_blocks + 1)]
