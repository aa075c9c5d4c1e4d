"""SpeculationView: its rounds are the scheduler's, its rates and means those of the log, at every position."""

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))

from sharing_support import Driver

from refimpl import LLM, SamplingParams
from refimpl.events import ArrivalRecord, EventLog, LogHeader, StepRecord
from refimpl.models.tiny import tiny
from refimpl.visualizers import Dashboard, SpeculationView, export_html
from refimpl.visualizers.figure import Look, plain
from refimpl.visualizers.history import History
from refimpl.visualizers.palette import DARK, LIGHT
from refimpl.visualizers.speculation_fold import SpeculationFold
from refimpl.visualizers.speculation_svg import chips
from refimpl.visualizers.speculation_view import FIGURE, MOST_LINES

V = 24
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [1, 2, 3] * 5, [i % V for i in range(20)]]


def drive(depth=0, seed=0, drafts=3, **options):
    driver = Driver(num_blocks=20, depth=depth, drafts=drafts, num_host_blocks=8, **options)
    for number in range(8):
        driver.add([seed + 1, number % 3, 3, 4 + number], max_tokens=12, n=1 + number % 2)
        driver.step()
    return driver.run()


@pytest.fixture(scope="module")
def ran():
    """A tiny engine with n-gram drafts, three a round: (its log, the output tokens by request)."""
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1}
    with LLM(tiny(vocab_size=V), speculative_config=speculative, block_size=4, max_model_len=96) as llm:
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        events = llm.engine.events
        token_text = llm.engine.tokenizer.token_text
    return events, {output.request_id: [token_text(t) for t in output.outputs[0].token_ids] for output in outputs}


def newest(log, look=None):
    history = History(log)
    return FIGURE.picture(history, len(history) - 1, *([look] if look else []))


# ---------------------------------------------------------------------- against the scheduler and the engine


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_rounds_are_those_that_the_scheduler_observed(depth, seed):
    driver = drive(depth, seed)
    history = History(driver.recorder.events)
    fold = history.fold(SpeculationFold)
    drafted = Counter(len(one.drafts) for one in fold.rounds if one.drafts)
    assert drafted == Counter(number for number, _ in driver.drafts.seen)
    whole = Counter((len(one.drafts), one.num_accepted) for one in fold.rounds if one.drafts and one.drawn is not None)
    cut = sum(one.drawn is None for one in fold.rounds)
    assert (Counter(driver.drafts.seen) - whole).total() == cut == fold.outcomes(len(history) - 1).num_cut > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_bring_every_token_but_those_that_prefills_draw(depth):
    driver = drive(depth)
    fold = History(driver.recorder.events).fold(SpeculationFold)
    records = list(driver.recorder.events.records)
    drawn = sum(sum(t >= 0 for t in r.token_ids) + sum(r.num_accepted) for r in records)
    assert drawn == sum(len(s.output_token_ids) for request in driver.requests.values() for s in request.sequences)
    after_prefills = drawn - sum(step.num_tokens for step in fold.steps)
    admitted = sum(len(record.admitted) for record in records)
    assert 0 < after_prefills <= admitted
    assert [step.num_drafts for step in fold.steps] == [max(record.num_drafts, default=0) for record in records]


def test_rounds_of_a_real_engine_spell_what_came_out(ran):
    log, texts = ran
    fold = History(log).fold(SpeculationFold)
    for request_id, tokens in texts.items():
        rounds = [one for one in fold.rounds if one.request_id == request_id]
        said = [
            t for one in rounds for t in (*one.drafts[: one.num_accepted], *([one.drawn] if one.drawn is not None else []))
        ]
        assert said == tokens[1 : 1 + len(said)]  # the first is the prefill's
        assert len(said) >= len(tokens) - 2, "the last one may be left to a row without drafts"
        assert any(one.num_accepted for one in rounds)


def test_the_picture_says_what_the_log_says(ran):
    log, _ = ran
    picture = newest(log)
    accepted = sum(sum(record.num_accepted) for record in log.records)
    assert sum(accepted for _, accepted in picture["places"]) == accepted
    rows = [row for r in log.records if r.drafts for row in zip(r.drafts, r.token_ids, r.num_accepted, strict=True)]
    assert picture["places"][0][0] == sum(bool(drafts) and (token >= 0 or number > 0) for drafts, token, number in rows)
    rounds = sum(number for _, number, _, _ in picture["lengths"])
    assert picture["num_rounds"] == rounds
    assert picture["measured"] == pytest.approx(sum(tokens for _, _, tokens, _ in picture["lengths"]) / rounds)
    assert len(picture["steps"]) == len(log.records)
    assert "A round with drafts brings " in plain(picture["caption"])


# ---------------------------------------------------------------------- rates and the prediction


def told(rounds):
    """A log of one sequence with these rounds: (drafts, accepted, whether a token was drawn behind them)."""
    header = LogHeader(1, "", 0.0, "virtual", {"block_size": 4, "num_blocks": 99, "max_model_len": 400, "max_num_seqs": 1})
    log = EventLog(header, 10_000)
    arrival = ArrivalRecord("r", (0,), (1, 2), ("a", "b"))
    log.append(StepRecord(0, 0.0, 0.1, (0,), (0,), (2,), (1,), ("c",), (arrival,), admitted=((0, 0, 0),)))
    for step, (made, accepted, drew) in enumerate(rounds, start=1):
        log.append(
            StepRecord(
                *(step, step / 10, step / 10 + 0.1, (0,), (0,), (1 + made,), (5 if drew else -1,), ("z" if drew else "",)),
                drafts=(tuple(range(made)),),
                draft_texts=(tuple("defghijk"[:made]),),
                num_drafts=(made,),
                num_accepted=(accepted,),
            )
        )
    return log


def test_with_one_number_of_drafts_and_no_ends_the_prediction_is_the_mean():
    rounds = [(3, 0, True)] * 5 + [(3, 1, True)] * 4 + [(3, 2, True)] * 3 + [(3, 3, True)] * 8
    picture = newest(told(rounds))
    assert picture["places"] == [[20, 15], [15, 11], [11, 8]]
    assert picture["measured"] == pytest.approx((5 + 8 + 9 + 32) / 20)
    assert picture["predicted"] == pytest.approx(picture["measured"])


def test_what_an_end_cuts_off_is_no_refusal():
    picture = newest(told([(3, 3, True)] * 4 + [(3, 1, False)]))
    assert picture["places"] == [[5, 5], [4, 4], [4, 4]]
    assert picture["predicted"] == 4.0
    assert picture["num_cut"] == 1
    assert "1 round was cut short" in plain(picture["caption"])


def test_rounds_of_several_lengths_are_predicted_each_by_its_own():
    picture = newest(told([(1, 1, True), (1, 0, True), (4, 4, True), (4, 4, True)]))
    assert picture["places"] == [[4, 3], [2, 2], [2, 2], [2, 2]]
    assert picture["lengths"] == [[1, 2, 3, 1.75], [4, 2, 10, 4.0]]
    assert picture["predicted"] == pytest.approx((1.75 + 4.0) / 2)


# ---------------------------------------------------------------------- form


def test_forms_of_a_rounds_tokens():
    assert chips(["a", "b", "c", "d"], 1, "x") == [
        *(("a", "accepted"), ("b", "refused"), ("c", "behind"), ("d", "behind"), ("x", "drawn"))
    ]
    assert chips(["a", "b"], 2, "x") == [("a", "accepted"), ("b", "accepted"), ("x", "drawn")]
    assert chips(["a", "b"], 1, None) == [("a", "accepted"), ("b", "behind")]


def test_letters_say_the_same():
    text = FIGURE.text(newest(told([(3, 1, True), (2, 2, True), (2, 1, False)])))
    assert "  A step     1  [d] -e- (f) +z" in text
    assert "  A step     2  [d e] +z" in text
    assert "  A step     3  [d] (e) end" in text
    assert "100%  3 of 3 accepted" in text


def test_svg_has_each_bar_its_count_and_each_chip_its_text(ran):
    picture = newest(ran[0])
    for palette in (LIGHT, DARK):
        svg = FIGURE.svg(picture, palette)
        ElementTree.fromstring(svg)
        for judged, accepted in picture["places"]:
            assert f"{accepted:,} of {judged:,}" in svg
        assert "1 + α₁ + α₁α₂ + …" in svg
    assert sum(len(rounds) for *_, rounds in picture["sequences"]) <= MOST_LINES
    json.dumps(picture)


def test_a_pinned_request_is_in_sight(ran):
    history = History(drive().recorder.events)
    pinned = history.fold(SpeculationFold).rounds[0].request_id
    shown = FIGURE.picture(history, len(history) - 1, Look(pinned=pinned))["sequences"]
    assert pinned in [request for _, request, _, _ in shown]


def test_a_picture_of_the_past_knows_nothing_of_later(ran):
    log, _ = ran
    history = History(log)
    for position in (-1, 0, 2, len(history) // 2, len(history) - 1):
        cut = EventLog(log.header, len(history))
        for record in history.records[: position + 1]:
            cut.append(record)
        assert FIGURE.picture(history, position) == FIGURE.picture(History(cut), position)


def test_rounds_are_forgotten_with_their_records():
    log = told([(2, i % 3, True) for i in range(900)])
    history, whole = History(EventLog(log.header, 100)), History(log)
    for record in log.records:
        history.append(record)
    assert history.first > 0
    fold = history.fold(SpeculationFold)
    last = FIGURE.picture(history, len(history) - 1)
    assert last["num_rounds"] == fold.rounds.num_kept == fold.num_rounds.num_kept < 900
    assert last["sequences"] == FIGURE.picture(whole, len(whole) - 1)["sequences"]
    for record in log.records:
        history.append(record)
    assert FIGURE.picture(history, len(history) - 1)["num_rounds"] == fold.rounds.num_kept < 900


def test_dashboards_and_pages_show_drafts_where_there_are_any(ran, tmp_path):
    log, _ = ran
    assert [name for name, *_ in Dashboard(log).shown][-1] == "speculation_view"
    assert "SpeculationView" in export_html(log, tmp_path / "with.html").read_text(encoding="utf-8")
    driver = Driver()
    driver.add([1, 2, 3])
    driver.run()
    without = driver.recorder.events
    assert "speculation_view" not in [name for name, *_ in Dashboard(without).shown]
    assert "SpeculationView" not in export_html(without, tmp_path / "without.html").read_text(encoding="utf-8")
    view = SpeculationView(without)
    assert view._repr_text() == "No tokens have been drafted and judged."
    ElementTree.fromstring(FIGURE.svg(newest(without), LIGHT))
