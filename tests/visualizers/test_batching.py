"""Static beside continuous: both runs on one scale, and the cost of waiting for the longest answer in numbers."""

import json
import random
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from sharing_support import Driver

from refimpl.cache.shadow import ShadowExecutor
from refimpl.visualizers.batching import MOST_ROWS, Batching, compare
from refimpl.visualizers.figure import plain
from refimpl.visualizers.history import History
from refimpl.visualizers.palette import LIGHT
from refimpl.visualizers.timeline_runs import PADDING


def run(lengths, **options):
    driver = Driver(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=64, prefix_cache=False, **options)
    driver.executor = ShadowExecutor(4, lambda path, token_ids: 1 + len(token_ids) % 6)
    for number, length in enumerate(lengths):
        driver.add([number % 7, 2, 3], max_tokens=length)
    while driver.scheduler.has_unfinished:
        driver.step()
    return History(driver.recorder.events)


def sides(lengths):
    return {"static": run(lengths, scheduler="static"), "continuous": run(lengths)}


LENGTHS = random.Random(3).choices([3, 4, 30], k=12)


def test_the_caption_is_what_both_runs_took():
    histories = sides(LENGTHS)
    picture = compare(histories)
    static, continuous = picture["sides"]
    assert [side["length"] for side in picture["sides"]] == [len(history) for history in histories.values()]
    assert static["tokens"] == continuous["tokens"] == sum(LENGTHS)
    padded = sum(
        end - start
        for row in static["rows"]
        for start, end, state, _, _ in zip(*[iter(row["runs"])] * 5, strict=True)
        if state == PADDING
    )
    held = sum(len(record.sequence_ids) for record in histories["static"].records)
    assert (static["padded_steps"], static["slot_steps"]) == (padded, held)
    assert (continuous["padded_steps"], continuous["slot_steps"]) == (0, sum(LENGTHS))
    assert padded == held - sum(LENGTHS)
    text = plain(picture["caption"])
    assert f"takes {len(histories['static'])} steps where continuous takes {len(histories['continuous'])}" in text
    assert f"; {padded / held:.0%} of its slot-steps" in text
    assert "The same 12 requests" in text


def test_a_request_has_one_hue_on_both_sides():
    static, continuous = compare(sides(LENGTHS))["sides"]
    assert [row["hue"] for row in static["rows"]] == [row["hue"] for row in continuous["rows"]]
    assert len({row["hue"] for row in continuous["rows"]}) > 4


def test_runs_of_other_requests_are_not_called_the_same():
    histories = {"static": run([3, 4], scheduler="static"), "continuous": run([3, 5])}
    assert "do not compare" in plain(compare(histories)["caption"])


def test_a_position_is_kept_within_each_run():
    histories = sides(LENGTHS)
    longest = len(histories["static"])
    for position, expected in ((longest - 1, len(histories["continuous"]) - 1), (5, 5), (-1, -1)):
        assert compare(histories, position)["sides"][1]["position"] == expected


def test_of_very_many_requests_the_first_are_drawn_and_the_others_counted():
    picture = compare(sides([2] * (MOST_ROWS + 40)))
    assert [(len(side["rows"]), side["num_hidden"]) for side in picture["sides"]] == [(MOST_ROWS, 40)] * 2
    assert "40 more sequences" in "".join(ElementTree.fromstring(Batching({}).svg(picture, LIGHT)).itertext())


@pytest.mark.parametrize("position", [None, 0, 10])
def test_the_figure_is_drawn_without_a_browser(position):
    figure = Batching(sides(LENGTHS))
    picture = figure.picture(None, position)
    json.dumps(picture)
    root = ElementTree.fromstring(figure.svg(picture, LIGHT))
    assert root.get("aria-label") == plain(picture["caption"])


def test_without_requests_there_is_a_picture():
    figure = Batching({"static": run([], scheduler="static"), "continuous": run([])})
    picture = figure.picture(None, None)
    assert picture["caption"] == [("No requests yet.", True)]
    ElementTree.fromstring(figure.svg(picture, LIGHT))
