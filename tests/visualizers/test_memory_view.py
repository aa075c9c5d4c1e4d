"""MemoryView: the same counts as the engine's memory report, and bars whose segments fill them exactly."""

import contextlib
import json
import random
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from prove import random_call, random_driver
from sharing_support import Driver

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.errors import RequestError
from refimpl.events import EventLog
from refimpl.memory_report import CacheUsage, MemoryReport
from refimpl.visualizers.figure import plain
from refimpl.visualizers.history import History
from refimpl.visualizers.memory_view import FIGURE
from refimpl.visualizers.palette import DARK, LIGHT
from refimpl.visualizers.words import names, percent, size

COUNTED = (
    "num_sequences", "used_blocks", "cached_blocks", "free_blocks", "filled_slots", "wasted_slots", "shared_slots",
)  # fmt: skip


def counted(usage: CacheUsage):
    return {name: getattr(usage, name) for name in COUNTED}


def newest(driver):
    history = History(driver.recorder.events)
    return FIGURE.picture(history, len(history) - 1)


def assert_full(picture):
    """Both bars are as long as the pool and the null block."""
    for bar in picture["bars"]:
        segments = [holder[4] for holder in bar["holders"]] + [slots for _, slots, _ in bar["rest"]]
        assert picture["null"] + sum(segments) == picture["slots"]
        assert all(0 <= holder[3] <= holder[4] for holder in bar["holders"])
        assert min(segments, default=1) > 0


def test_the_counts_and_bytes_are_those_of_the_memory_report():
    args = {"block_size": 4, "num_gpu_blocks_override": 30, "max_num_batched_tokens": 24, "max_model_len": 40}
    engine = Engine(EngineArgs(model="tiny", max_num_seqs=6, **args))
    history = History(engine.events)
    engine.events.subscribe(history.append)
    for number in range(5):
        prompt = [7, 8, 9, 1, 2] * 2 + [number] * number
        engine.add_request(f"r{number}", prompt, SamplingParams(max_tokens=14, n=1 + number % 3, seed=1, ignore_eos=True))
    shared = cached = 0
    while engine.has_unfinished_requests():
        engine.step()
        report = engine.memory_report()
        picture = FIGURE.picture(history, len(history) - 1)
        assert picture["usage"] == counted(report.usage)
        assert_full(picture)
        memory = picture["memory"]
        assert (memory["weight_bytes"], memory["pool_bytes"]) == (report.weight_bytes, report.pool_bytes)
        assert (memory["block_bytes"], memory["device"]) == (report.block_bytes, report.device)
        assert picture["fit"] == min(report.usage.num_sequences, report.sequences_that_fit(1)[1])
        assert isinstance(report, MemoryReport)
        shared += report.usage.shared_slots
        cached += report.usage.cached_blocks
    assert shared
    assert cached
    engine.close()


@pytest.mark.parametrize("seed", range(20))
def test_the_counts_are_the_schedulers_in_random_runs(seed):
    rng = random.Random(seed)
    driver = random_driver(rng)
    history = History(driver.recorder.events)
    driver.recorder.events.subscribe(history.append)
    for _ in range(120):
        name, arguments = random_call(rng, driver)
        with contextlib.suppress(RequestError):
            getattr(driver, name)(**arguments)
        if name == "step" and not driver.in_flight:
            picture = FIGURE.picture(history, len(history) - 1)
            assert picture["usage"] == counted(driver.scheduler.usage())
            assert_full(picture)


def test_what_does_not_fit_in_reservations_is_named():
    driver = Driver(num_blocks=20, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=28)
    for number in (0, 1, 3, 4):  # 2 would end at once
        driver.add([number] * 6, max_tokens=9)
    driver.step()
    picture = newest(driver)
    contiguous, paged = picture["bars"]
    assert [holder[0] for holder in contiguous["holders"]] == ["A", "B"]
    assert contiguous["numbers"] == [
        "15% holds tokens",
        "55% reserved and empty",
        "30% too short for another 28",
        "2 fit, no room for C and D",
    ]
    assert contiguous["rest"] == [["stranded", 24, "too short"]]
    assert paged["numbers"] == ["30% holds tokens", "10% empty inside last blocks", "60% free", "4 run"]
    assert "2 of 4 fit; paged takes blocks as they fill, so all 4 run" in plain(picture["caption"])


def test_room_for_more_reservations_is_free_not_lost():
    driver = Driver(num_blocks=20, max_model_len=28)
    driver.add([1, 2, 3], max_tokens=9)
    driver.step()
    contiguous, _ = newest(driver)["bars"]
    assert contiguous["rest"] == [["free", 28, "room for 1 more"], ["stranded", 24, "too short"]]
    assert contiguous["numbers"][-1] == "1 fit"


def test_shared_blocks_are_drawn_once_and_say_whose_they_are():
    driver = Driver(num_blocks=40, max_num_batched_tokens=64)
    driver.add([1, 2, 3, 4, 5, 6], n=3, max_tokens=9)
    driver.step()
    picture = newest(driver)
    _, paged = picture["bars"]
    assert paged["holders"] == [["A·0, A·1 and A·2", ["0"], [0], 6, 8, 3]]
    assert "18 tokens of the sequences stand in 6 slots" in plain(picture["caption"])
    driver.step()
    _, paged = newest(driver)["bars"]
    assert [holder[0] for holder in paged["holders"]] == ["A·0, A·1 and A·2", "A·0", "A·1", "A·2"]


def test_cached_prefixes_are_grey_and_counted():
    driver = Driver(num_blocks=40)
    driver.add([1, 2, 3, 4, 5, 6], max_tokens=9)
    driver.run()
    picture = newest(driver)
    _, paged = picture["bars"]
    kept = picture["usage"]["cached_blocks"]
    assert kept
    assert paged["rest"][0] == ["cached", 4 * kept, f"cached prefixes {4 * kept}"]
    assert f"{kept} keep prefixes that may be taken" in plain(picture["caption"])


def test_a_run_that_reserves_is_drawn_as_it_is_and_paged_is_computed():
    driver = Driver(num_blocks=20, kv_cache_manager="contiguous", max_model_len=28)
    for number in range(3):
        driver.add([number] * 6, max_tokens=9)
    driver.step()
    picture = newest(driver)
    assert picture["usage"]["used_blocks"] == 14
    assert_full(picture)
    contiguous, paged = picture["bars"]
    assert contiguous["note"].startswith("as this engine runs")
    assert [holder[3:5] for holder in contiguous["holders"]] == [(6, 28), (6, 28)]
    assert [holder[3:5] for holder in paged["holders"]] == [(6, 8), (6, 8)]
    assert "Paged, they would take 4 of its 20 blocks" in plain(picture["caption"])


def test_a_log_without_bytes_shows_blocks_and_tokens():
    driver = Driver()
    driver.add([1, 2, 3], max_tokens=3)
    driver.step()
    log = driver.recorder.events
    for key in ("weight_bytes", "block_bytes", "device"):
        log.header.config.pop(key, None)
    picture = newest(driver)
    assert picture["memory"] is None
    assert picture["scale"] == "a block has 4 slots; the bars span 84 slots, the null block's among them"
    assert "KV pool" not in FIGURE.svg(picture, LIGHT)
    log.header.config.update(weight_bytes=0, block_bytes=0, device="")
    assert newest(driver)["memory"] is None


def test_empty_and_truncated_logs():
    driver = Driver()
    history = History(driver.recorder.events)
    picture = FIGURE.picture(history, -1)
    assert plain(picture["caption"]) == "No requests yet: 20 of 20 blocks are free."
    assert_full(picture)
    for number in range(3):
        driver.add([number, 2, 3], max_tokens=4)
    driver.run()
    log = driver.recorder.events
    cut = EventLog(log.header, 1000)
    cut.records.extend(list(log.records)[2:])
    history = History(cut)
    for position in range(-1, len(history)):
        picture = FIGURE.picture(history, position)
        assert_full(picture)
    assert "begins in the middle" in plain(picture["caption"])


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_the_svg_is_xml_and_says_its_caption(palette):
    args = {"block_size": 4, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 64, "max_model_len": 40}
    engine = Engine(EngineArgs(model="tiny", **args))
    for name in ("<a>", "b & c"):
        engine.add_request(name, "A story", SamplingParams(max_tokens=6, n=2, seed=1, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    history = History(engine.events)
    for position in range(-1, len(history)):
        picture = FIGURE.picture(history, position)
        json.dumps(picture)
        root = ET.fromstring(FIGURE.svg(picture, palette))
        assert root.attrib["aria-label"] == plain(picture["caption"])
    engine.close()


def test_words():
    shares = ["0%", "<1%", "0%", "48%", ">99%", ">99%", "100%"]
    assert [percent(part, 1000) for part in (0, 1, 5, 484, 995, 999, 1000)] == shares
    assert percent(0, 0) == "0%"
    assert [size(n) for n in (0, 1023, 360 * 1024, 1536, 43_830_280, 5 * 1024**3, 5_500_000_000)] == [
        "0 B", "1,023 B", "360 KiB", "1.5 KiB", "41.8 MiB", "5 GiB", "5.12 GiB",
    ]  # fmt: skip
    assert names("A") == "A"
    assert names("AB") == "A and B"
    assert names("ABCDEF") == "A, B, C, D, E and F"
    assert names("ABCDEFGH") == "A, B, C, D, E and 3 more"
