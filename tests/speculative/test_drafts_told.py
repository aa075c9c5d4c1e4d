"""What is told of drafts outside their own view: metrics, stories, tables, and the pictures of everything else."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from sharing_support import Driver

from refimpl import LLM, SamplingParams
from refimpl.models.tiny import tiny
from refimpl.visualizers import export_perfetto
from refimpl.visualizers.batch_timeline import FIGURE as TIMELINE
from refimpl.visualizers.frames import why
from refimpl.visualizers.history import History
from refimpl.visualizers.latency_view import FIGURE as LATENCY
from refimpl.visualizers.memory_view import FIGURE as MEMORY
from refimpl.visualizers.terminal import render
from refimpl.visualizers.timeline_runs import DECODE, PREFILL

V = 24
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [1, 2, 3] * 5, [i % V for i in range(20)]]


@pytest.fixture(scope="module")
def ran():
    """A tiny engine with n-gram drafts: (its log, outputs, stories)."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1}
    with LLM(tiny(vocab_size=V), speculative_config=speculative, block_size=4, max_model_len=96) as llm:
        for number, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, n=1 + (number == 1))
            llm.engine.add_request(f"r{number}", prompt, params)
        found = {}
        while llm.engine.has_unfinished_requests():
            found |= {output.request_id: output for output in llm.engine.step()}
        return llm.engine.events, found, {name: llm.engine.explain(name) for name in found}


def counted(log, request_id):
    """(drafted, accepted) by the records."""
    ids = {s for r in log.records for a in r.arrived if a.request_id == request_id for s in a.sequence_ids}
    rows = [row for r in log.records if r.drafts for row in zip(r.sequence_ids, r.drafts, r.num_accepted, strict=True)]
    return sum(len(d) for s, d, _ in rows if s in ids), sum(a for s, _, a in rows if s in ids)


def test_metrics_and_stories_count_a_requests_drafts(ran):
    log, outputs, stories = ran
    for name, output in outputs.items():
        metrics = output.metrics
        assert (metrics.num_drafts, metrics.num_accepted) == counted(log, name)
        assert 0 < metrics.num_accepted < metrics.num_drafts
        assert f"{metrics.num_drafts:,} tokens, {metrics.num_accepted:,} of them accepted" in str(metrics)
        said = f"of {metrics.num_drafts} drafted tokens, {metrics.num_accepted} were accepted"
        assert stories[name].endswith(said)


def test_without_drafts_nothing_is_said_of_them():
    with LLM("tiny") as llm:
        [output] = llm.generate("a", SamplingParams(max_tokens=3), use_tqdm=False)
        assert (output.metrics.num_drafts, output.metrics.num_accepted) == (0, 0)
        assert "draft" not in str(output.metrics) + llm.engine.explain(output.request_id)


def test_the_table_has_drafts_beside_the_tokens(ran):
    pytest.importorskip("pandas")
    log, outputs, _ = ran
    frame = log.to_pandas()
    by_request = frame.groupby("request_id")[["num_drafts", "num_accepted"]].sum()
    for name, output in outputs.items():
        assert tuple(by_request.loc[name]) == counted(log, name)
        rows = frame[frame.request_id == name]
        assert rows.num_accepted.sum() + rows.token_id.notna().sum() == sum(len(s.token_ids) for s in output.outputs)
    assert set(frame[frame.num_drafts > 0].kind) == {"decode"}


def test_a_check_is_a_decode_with_its_drafts_in_the_timeline(ran):
    log, outputs, _ = ran
    history = History(log)
    rows = TIMELINE.picture(history, len(history) - 1)["rows"]
    for name, output in outputs.items():
        own = [row for row in rows if row["request"] == name]
        assert [row["tokens"] for row in own] == [len(sample.token_ids) for sample in output.outputs]
        runs = [run for row in own for run in zip(*[iter(row["runs"])] * 5, strict=True)]
        computed = [state for _, _, state, drawn, _ in runs if drawn]
        assert computed.count(PREFILL) <= 1, "checks of several tokens are no prefills"
        assert max(drafts for _, _, state, _, drafts in runs if state == DECODE) == 3
        assert all(drawn <= drafts + 1 for _, _, state, drawn, drafts in runs if state == DECODE)


def test_a_trace_counts_the_drafts_of_each_stretch(ran, tmp_path):
    log, _, _ = ran
    export_perfetto(log, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    checked = sum(event["args"].get("drafts checked", 0) for event in events if event["ph"] == "X")
    assert checked == sum(sum(record.num_drafts) for record in log.records)


def test_pauses_are_between_steps_and_tokens_of_one_step_have_none(ran):
    log, outputs, _ = ran
    history = History(log)
    gaps = [gap for output in outputs.values() for sample in output.metrics.inter_token_latencies for gap in sample]
    pauses = LATENCY.picture(history, len(history) - 1)["pauses"]
    assert pauses["count"] == sum(gap > 0 for gap in gaps) < len(gaps)
    assert pauses["p50"] > 1e-5


def test_the_terminal_and_the_reasons_tell_of_drafts(ran):
    log, outputs, _ = ran
    history = History(log)
    drafted, accepted = (sum(counted(log, name)[i] for name in outputs) for i in (0, 1))
    header = render(history, len(history) - 1, width=200, height=30, colour=False).split("\n")[0]
    assert f" of {drafted:,} drafts accepted, " in header
    assert accepted
    assert "no drafts yet" in render(history, 0, width=200, height=30, colour=False)
    told = [what for position in range(len(history)) for _, what in why(history, position)]
    assert any("of them drafts, of which" in what for what in told)


@pytest.mark.parametrize("seed", range(2))
def test_blocks_for_refused_drafts_are_nobodys_after_the_step(seed):
    """Slots are taken ahead for drafts; the pictures' counts stay the scheduler's, step by step."""
    driver = Driver(num_blocks=20, block_size=2, drafts=5)
    history = History(driver.recorder.events)
    driver.recorder.events.subscribe(history.append)
    for number in range(6):
        driver.add([seed, number, 3], max_tokens=12)
    returned = 0
    while driver.scheduler.has_unfinished:
        driver.step()
        usage = MEMORY.picture(history, len(history) - 1)["usage"]
        known = driver.scheduler.usage()
        assert usage == {name: getattr(known, name) for name in usage}
        returned += len(history.records[-1].returned)
    assert returned
