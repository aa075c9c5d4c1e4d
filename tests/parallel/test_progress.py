"""Which rank the others wait for: long work is no hang, and a hang is named."""

import pytest

from refimpl.errors import ConfigError
from refimpl.parallel.progress import WHILE_LOADING_SECONDS, Progress

PATIENCE = 300
SERVING = {1, 2}


def at(*entered):
    progress = Progress(3, PATIENCE)
    for rank, count in enumerate(entered):
        progress.tell(rank, count)
    return progress


def test_a_rank_that_others_wait_for_is_named():
    progress = at(42, 42, 41)
    assert progress.stuck(1000, SERVING) is None
    assert progress.stuck(1000 + PATIENCE, SERVING) is None
    assert "rank 2 lives but is stuck: others have waited 301 seconds in their collective 42, and it has entered 41" in (
        progress.stuck(1001 + PATIENCE, SERVING)
    )


def test_of_several_that_are_behind_the_one_that_all_wait_for_is_named():
    progress = at(80, 78, 12)
    progress.stuck(0, SERVING)
    assert "rank 2" in progress.stuck(PATIENCE + 1, SERVING)


def test_long_work_of_all_ranks_is_no_hang_nor_is_an_idle_engine():
    progress = at(42, 42, 42)
    assert progress.stuck(0, SERVING) is None
    assert progress.stuck(100 * PATIENCE, SERVING) is None
    progress.tell(0, 43)  # and now they begin to wait
    assert progress.stuck(100 * PATIENCE + 1, SERVING) is None


def test_a_rank_that_enters_one_more_collective_is_given_all_the_time_again():
    progress = at(50, 50, 41)
    progress.stuck(0, SERVING)
    progress.tell(2, 42)
    assert progress.stuck(PATIENCE, SERVING) is None
    assert progress.stuck(2 * PATIENCE, SERVING) is None
    assert "rank 2" in progress.stuck(2 * PATIENCE + 1, SERVING)


def test_rank_0_may_be_waited_for():
    progress = at(41, 42, 42)
    assert progress.stuck(0, SERVING) is None
    assert progress.stuck(100 * PATIENCE, SERVING) is None


def test_a_rank_that_loads_may_take_longer():
    progress = at(2, 2, 1)
    assert progress.stuck(0, {1}) is None
    assert progress.stuck(WHILE_LOADING_SECONDS, {1}) is None
    assert "rank 2" in progress.stuck(WHILE_LOADING_SECONDS + 1, {1})


def test_when_the_engine_itself_was_stopped_waiting_begins_again():
    progress = at(42, 42, 41)
    progress.stuck(0, SERVING)
    progress.forget()
    assert progress.stuck(PATIENCE + 1, SERVING) is None


def test_the_time_must_be_a_whole_number_of_seconds():
    from refimpl import EngineArgs

    with pytest.raises(ConfigError, match="distributed_timeout_seconds is 0; it must be a whole number, 1 or more"):
        EngineArgs(distributed_timeout_seconds=0)
