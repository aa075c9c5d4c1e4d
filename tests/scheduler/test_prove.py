"""The long proof's command: what is good raises no alarm, what is planted does, and a failing walk tells where."""

import re

import pytest
from planted import ALARMS, PLANTED, copies_the_wrong_block, leak_on_abort
from prove import SEEN, WalkError, main, prove, walk

from refimpl.events import EventLog


def test_ten_thousand_good_states_raise_no_alarm():
    seen = prove(seed=0, steps=8_000)
    assert seen["audits"] >= 10_000
    assert all(seen[what] for what in SEEN), seen


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_walks_see_a_planted_fault(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(WalkError) as failure:
        prove(seed=0, steps=5_000)
    assert isinstance(failure.value.__cause__, ALARMS)


def test_seed_and_number_say_all_of_a_walk():
    first, second, other = walk(3, 1), walk(3, 1), walk(3, 2)
    assert first.recorder.events.records == second.recorder.events.records
    assert first.recorder.events.records != other.recorder.events.records


def test_a_failing_walk_leaves_a_log_that_tells_the_failing_step(monkeypatch, tmp_path, capsys):
    copies_the_wrong_block(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert main(["--seed", "5", "--steps", "5000"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("seed 5\n")
    [number] = re.findall(r"repeat: python tests/scheduler/prove.py --seed 5 --walk (\d+)\n", output)
    log = EventLog.load(tmp_path / f"failed-walk-5-{number}.jsonl")
    last = log.records[-1]
    assert last.copies, "the step of the first copy is the one that fails"
    assert f"step {last.step}: sequence " in log.header.config["failure"]
    assert all(record.copies == () for record in list(log.records)[:-1])


def test_a_failing_walk_fails_alone_as_it_did_among_others(monkeypatch, tmp_path, capsys):
    copies_the_wrong_block(monkeypatch)
    monkeypatch.chdir(tmp_path)
    main(["--seed", "5", "--steps", "5000"])
    among_others = capsys.readouterr().out
    [number] = re.findall(r"--walk (\d+)", among_others)
    assert main(["--seed", "5", "--walk", number]) == 1
    assert capsys.readouterr().out == among_others
    monkeypatch.undo()
    assert main(["--seed", "5", "--walk", number]) == 0
    assert "clean: " in capsys.readouterr().out


def test_the_log_tells_what_failed_between_two_steps(monkeypatch, tmp_path):
    leak_on_abort(monkeypatch)
    with pytest.raises(WalkError) as failure:
        prove(seed=0, steps=5_000)
    assert failure.value.call.startswith("abort(")
    log = EventLog.load(failure.value.save(tmp_path))
    assert {finish.reason for finish in log.records[-1].aborted} == {"abort"}
