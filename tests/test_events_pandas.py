"""The event log as a table: one row a step and sequence, and each row's kind."""

import builtins
import itertools

import pytest

from refimpl import Engine, EngineArgs, SamplingParams
from refimpl.errors import RefimplError
from refimpl.events import EventLog, RowKinds

pd = pytest.importorskip("pandas")

COLUMNS = {
    "step": "int64",
    "scheduled_at": "float64",
    "updated_at": "float64",
    "sequence_id": "int64",
    "request_id": None,
    "slot": "int64",
    "num_new_tokens": "int64",
    "token_id": "Int64",
    "token_text": None,
    "kind": None,
    "num_drafts": "int64",
    "num_accepted": "int64",
}


def run(overlap=False, **options):
    """A tiny engine with chunks, samples, a fork and preemptions: its log, and the output tokens by request."""
    ticks = map(float, itertools.count())
    sizes = {"block_size": 4, "num_gpu_blocks_override": 14, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    args = EngineArgs(model="tiny", async_scheduling=overlap, **sizes | options)
    engine = Engine(args, clock=lambda: next(ticks))
    for number in range(6):
        params = SamplingParams(max_tokens=12, ignore_eos=True, n=2 if number == 1 else 1, seed=number)
        engine.add_request(f"r{number}", list(range(1, 5 + 3 * number)), params)
    tokens = {}
    for step in itertools.count():
        if step == 3:
            engine.fork("r0", "fork")
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            tokens[output.request_id] = sum(len(sample.token_ids) for sample in output.outputs)
    engine.close()
    return engine.events, tokens


@pytest.fixture(scope="module")
def log():
    log, _ = run()
    assert any(record.preempted for record in log.records)
    return log


def test_a_row_is_a_step_and_sequence(log):
    table = log.to_pandas()
    assert list(table.columns) == list(COLUMNS)
    assert {name: str(table[name].dtype) for name, kind in COLUMNS.items() if kind} == {
        k: v for k, v in COLUMNS.items() if v
    }
    cells = [(record, index) for record in log.records for index in range(len(record.sequence_ids))]
    assert len(table) == len(cells)
    for (record, index), row in zip(cells, table.itertuples(index=False), strict=True):
        assert (row.step, row.scheduled_at, row.updated_at) == (record.step, record.scheduled_at, record.updated_at)
        assert (row.sequence_id, row.slot) == (record.sequence_ids[index], record.slots[index])
        assert row.num_new_tokens == record.num_new_tokens[index]
        if record.token_ids[index] < 0:
            assert pd.isna(row.token_id)
            assert pd.isna(row.token_text)
        else:
            assert (row.token_id, row.token_text) == (record.token_ids[index], record.token_texts[index])


@pytest.mark.parametrize("overlap", [False, True], ids=["depth 0", "depth 1"])
def test_the_tokens_of_a_request_are_those_of_its_outputs(overlap):
    log, tokens = run(overlap)
    table = log.to_pandas()
    assert table.groupby("request_id").token_id.count().to_dict() == tokens


@pytest.mark.parametrize("overlap", [False, True], ids=["depth 0", "depth 1"])
def test_a_prefill_ends_with_the_first_token_and_comes_again_after_a_preemption(overlap):
    log, _ = run(overlap)
    table = log.to_pandas()
    preempted = {(p.sequence_id, record.step) for record in log.records for p in record.preempted}
    forked = {child for record in log.records for _, child in record.forks}
    for sequence_id, rows in table.groupby("sequence_id"):
        last = None
        for row in rows.itertuples():
            again = any(s == sequence_id and last is not None and last.step < step <= row.step for s, step in preempted)
            if last is None and sequence_id in forked:
                pass  # told by the next test
            elif last is None or again or (last.kind == "prefill" and pd.isna(last.token_id)):
                assert row.kind == "prefill"
            else:
                assert row.kind == "decode"
                assert row.num_new_tokens == 1
            last = row


def test_a_fork_goes_on_decoding_and_a_sample_begins_with_its_prompt():
    log, _ = run(max_num_seqs=8, num_gpu_blocks_override=60)
    table = log.to_pandas()
    first = table.groupby("request_id").first()
    assert first.kind["fork"] == "decode"
    samples = table[table.request_id == "r1"].groupby("sequence_id").first()
    assert list(samples.kind) == ["prefill", "prefill"]
    assert 0 in list(samples.num_new_tokens)


def test_computing_all_again_in_each_step_is_a_decode_all_the_same():
    log, _ = run(enable_kv_cache=False, max_num_batched_tokens=64)
    table = log.to_pandas()
    assert (table[table.kind == "decode"].num_new_tokens > 1).all()
    assert table.groupby("sequence_id").kind.first().eq("prefill").all()


def test_a_log_that_lost_its_beginning_misses_names_not_rows(log):
    part = EventLog(log.header, 1000)
    part.records.extend(list(log.records)[9:])
    table = part.to_pandas()
    assert len(table) == sum(len(record.sequence_ids) for record in part.records)
    assert table.request_id.isna().any()
    whole = log.to_pandas().iloc[-len(table) :].reset_index(drop=True)
    assert (table.kind == whole.kind).mean() > 0.9


def test_row_kinds_keep_nothing_of_what_has_ended(log):
    kinds = RowKinds()
    for record in log.records:
        assert len(kinds.of(record)) == len(record.sequence_ids)
    assert kinds._prefilling == set()


def test_an_empty_log_is_an_empty_table(log):
    table = EventLog(log.header, 1).to_pandas()
    assert len(table) == 0
    assert list(table.columns) == list(COLUMNS)
    assert str(table.token_id.dtype) == "Int64"


def test_without_pandas_it_says_what_to_install(log, monkeypatch):
    real = builtins.__import__

    def no_pandas(name, *args, **kwargs):
        if name.split(".")[0] == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pandas)
    with pytest.raises(RefimplError, match="pip install pandas"):
        log.to_pandas()
