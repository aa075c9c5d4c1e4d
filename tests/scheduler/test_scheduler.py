"""What the scheduler decides, without a model: budget, chunks, admission, preemption, stops, and the size of its records."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_support import FakeExecutor, books, make_request, make_scheduler, run_all

from refimpl.decision_texts import describe
from refimpl.errors import PromptError
from refimpl.outputs import Batch, SchedulerOutput
from refimpl.request import Status


def test_a_prompt_over_the_budget_is_computed_in_chunks_beside_decodes():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_request(0, 10, max_tokens=5))
    scheduler.add(make_request(1, 40, max_tokens=2))
    steps = [tuple(output.batch.num_new_tokens) for output in run_all(scheduler)]
    assert steps == [(10, 6), (1, 15), (1, 15), (1, 4), (1, 1)]


@pytest.mark.parametrize("depth", [0, 1])
def test_no_step_exceeds_the_budget_or_the_slots(depth):
    scheduler = make_scheduler(max_num_batched_tokens=7, max_num_seqs=3)
    for number in range(9):
        scheduler.add(make_request(number, 1 + 3 * number, max_tokens=1 + number % 4))
    for output in run_all(scheduler, depth):
        assert output.batch.num_tokens <= 7
        assert len(output.batch.slots) <= 3 == scheduler.config.max_num_seqs
        assert len(set(output.batch.slots)) == len(output.batch.slots)


def test_without_chunking_a_prompt_waits_for_a_step_that_has_room():
    scheduler = make_scheduler(max_num_batched_tokens=16, enable_chunked_prefill=False)
    scheduler.add(make_request(0, 10, max_tokens=3))
    scheduler.add(make_request(1, 16, max_tokens=1))
    steps = [tuple(output.batch.num_new_tokens) for output in run_all(scheduler)]
    assert steps == [(10,), (1,), (1,), (16,)]


def test_a_request_that_can_never_fit_is_refused_and_the_one_behind_it_runs():
    scheduler = make_scheduler(num_blocks=2, max_model_len=100)
    with pytest.raises(PromptError, match="need 3 blocks; the whole cache has 2") as caught:
        scheduler.add(make_request(0, 8, max_tokens=4))
    assert caught.value.numbers == {"needed": 3, "blocks": 2}
    scheduler.add(make_request(1, 3, max_tokens=2))
    run_all(scheduler)
    assert scheduler.kv.num_free_blocks == 2


@pytest.mark.parametrize("depth", [0, 1])
def test_one_that_fills_the_pool_alone_ends_with_reason_length_and_says_so(depth):
    scheduler = make_scheduler(num_blocks=2, max_model_len=100)
    request, behind = make_request(0, 6, max_tokens=50), make_request(1, 2, max_tokens=2)
    scheduler.add(request)
    scheduler.add(behind)
    run_all(scheduler, depth)
    [sequence] = request.sequences
    assert sequence.finish_reason == "length"
    assert "KV cache of 2 blocks is full" in sequence.stop_reason
    assert len(sequence.token_ids) == 9, "8 tokens are cached, and the ninth was drawn from them"
    assert behind.sequences[0].finish_reason == "length"
    assert len(behind.sequences[0].output_token_ids) == 2


@pytest.mark.parametrize("depth", [0, 1])
def test_the_oldest_always_advances_and_preemptions_are_bounded(depth):
    """Three long requests, room for one and a half."""
    scheduler = make_scheduler(num_blocks=15)
    requests = [make_request(number, 8, max_tokens=32) for number in range(3)]
    for request in requests:
        scheduler.add(request)

    def oldest_has_a_row(output):
        alive = [r.sequences[0] for r in requests if not r.finished and not r.sequences[0].ending]
        if alive and output.preempted:
            assert min(s.sequence_id for s in alive) in output.batch.sequence_ids

    outputs = run_all(scheduler, depth, each_step=oldest_has_a_row)
    preempted = [p.sequence_id for output in outputs for p in output.preempted]
    assert 0 < len(preempted) <= 6
    assert 0 not in preempted, "the oldest gives way to nobody"
    assert [len(r.sequences[0].output_token_ids) for r in requests] == [32, 32, 32]
    finished = [r.metrics.finished_time for r in requests]
    assert finished == sorted(finished), "preempted requests keep their place before newer ones"


def test_the_newest_gives_way_and_no_victim_is_in_the_same_step():
    scheduler = make_scheduler(num_blocks=6)
    for number in range(3):
        scheduler.add(make_request(number, 8, max_tokens=12))

    def check(output):
        assert not {p.sequence_id for p in output.preempted} & set(output.batch.sequence_ids)
        assert not (output.preempted and output.admitted)

    outputs = run_all(scheduler, each_step=check)
    first = next(output for output in outputs if output.preempted)
    assert first.preempted[0].sequence_id == max(
        s for output in outputs[: first.step + 1] for s in output.batch.sequence_ids
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_token_ends_a_sequence_and_the_token_after_it_is_dropped(depth):
    scheduler = make_scheduler(eos=(2,))
    request = make_request(0, 5, max_tokens=20)
    scheduler.add(request)
    run_all(scheduler, depth, stop_at=8)
    [sequence] = request.sequences
    assert sequence.finish_reason == "stop"
    assert sequence.output_token_ids == [15, 16, 17, 2]
    assert scheduler.kv.num_free_blocks == scheduler.kv.num_blocks


def test_every_end_of_sequence_id_stops_and_ignore_eos_goes_on():
    for params, reason, count in [
        ({}, "stop", 2),
        ({"ignore_eos": True}, "length", 6),
        ({"stop_token_ids": (15,)}, "stop", 1),
    ]:
        scheduler = make_scheduler(eos=(99, 16))
        request = make_request(0, 5, max_tokens=6, **params)
        scheduler.add(request)
        run_all(scheduler)
        [sequence] = request.sequences
        assert (sequence.finish_reason, len(sequence.output_token_ids)) == (reason, count)
        assert sequence.stop_reason == (15 if "stop_token_ids" in params else None)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps_before", range(8))
def test_an_abort_at_any_moment_gives_everything_back(steps_before, depth):
    """While waiting, in the middle of a prompt, running, with a token in flight, preempted, finished, and twice."""
    scheduler = make_scheduler(num_blocks=7, max_num_batched_tokens=8)
    requests = [make_request(number, 10, max_tokens=6) for number in range(3)]
    for request in requests:
        scheduler.add(request)
    executor, in_flight = FakeExecutor(), []
    for _ in range(steps_before):
        output = scheduler.schedule()
        if not output.empty:
            in_flight.append((output, executor.run(output)))
        if len(in_flight) > depth:
            scheduler.update(*in_flight.pop(0))
    for request in requests:
        scheduler.abort(request)
        scheduler.abort(request)
        assert books(scheduler) == []
        assert request.finished
    for late in in_flight:
        assert set(scheduler.update(*late).token_ids) == {-1}
    assert not scheduler.has_unfinished
    assert len(scheduler.waiting) == 0
    assert scheduler.kv.num_free_blocks == 7
    scheduler.add(make_request(3, 10, max_tokens=6))
    run_all(scheduler)


def steady_decode(num_sequences):
    """A scheduler whose sequences all decode, with the outputs of its next 16 steps."""
    scheduler = make_scheduler(num_blocks=4096, block_size=16, max_num_seqs=512, max_num_batched_tokens=4096)
    for number in range(num_sequences):
        scheduler.add(make_request(number, 4, max_tokens=100))
    executor = FakeExecutor()
    outputs = []
    for _ in range(18):
        outputs.append(scheduler.schedule())
        scheduler.update(outputs[-1], executor.run(outputs[-1]))
    return outputs[1], outputs[2:]


def test_a_decode_step_is_as_large_as_its_changes_not_as_its_batch():
    sizes = {}
    for num_sequences in (4, 256):
        first, decodes = steady_decode(num_sequences)
        quiet = [output for output in decodes if not output.new_blocks]
        assert all(output.batch is first.batch for output in decodes), "the rows are one object while nothing changes"
        assert len(quiet) == 15
        sizes[num_sequences] = {len(output.to_wire(first.batch.version)) for output in quiet}
        [busy] = [output for output in decodes if output.new_blocks]
        assert len(busy.to_wire(first.batch.version)) < 16 + 12 * num_sequences
    assert sizes[4] == sizes[256]
    assert max(sizes[256]) <= 16


def test_a_step_without_rows_is_executed_if_a_search_chose_a_token():
    nothing = Batch(0, (), (), ())
    assert SchedulerOutput(0, nothing).empty
    assert not SchedulerOutput(0, nothing, chosen=((0, 7),)).empty
    assert not SchedulerOutput(0, nothing, swapped_out=((1, 1),)).empty


def test_the_wire_carries_what_an_executor_needs():
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 5, temperature=0.5, top_k=3))
    output = scheduler.schedule()
    received = SchedulerOutput.from_wire(output.to_wire(known_version=0), known=output.batch)
    for name in ("step", "batch", "admitted", "restarted", "new_blocks"):
        assert getattr(received, name) == getattr(output, name)
    short = output.to_wire(known_version=output.batch.version)
    assert SchedulerOutput.from_wire(short, known=output.batch).batch is output.batch
    with pytest.raises(ValueError, match="holds batch"):
        SchedulerOutput.from_wire(short, known=make_scheduler().schedule().batch)


def test_decisions_tell_why_with_numbers():
    scheduler = make_scheduler(num_blocks=7, max_num_batched_tokens=8)
    requests = [make_request(0, 12, max_tokens=14), make_request(1, 12, max_tokens=4)]
    for request in requests:
        scheduler.add(request)
    run_all(scheduler)
    told = [describe(decision) for decision in requests[1].sequences[0].decisions]
    kinds = [decision.kind for decision in requests[1].sequences[0].decisions]
    assert kinds[0] == "arrived"
    assert kinds[-1] == "finished"
    assert "preempted" in kinds
    assert "resumed" in kinds
    assert any("waits: needs" in text and "free" in text for text in told)
    assert any("is preempted (recompute)" in text and "first" in text for text in told)
    steps = [decision.step for decision in requests[1].sequences[0].decisions]
    assert steps == sorted(steps)


def test_waiting_reasons_are_recorded_when_they_change_only():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request(0, 4, max_tokens=30))
    waiting = make_request(1, 4, max_tokens=1)
    scheduler.add(waiting)
    run_all(scheduler)
    assert [d.kind for d in waiting.sequences[0].decisions].count("waits_slot") == 1


@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=8),
    num_blocks=st.integers(12, 30),
    budget=st.integers(4, 40),
    slots=st.integers(1, 4),
    depth=st.integers(0, 1),
    stop_at=st.integers(1, 40),
    aborts=st.dictionaries(st.integers(0, 40), st.integers(0, 7), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_any_load_ends_with_every_request_answered_and_every_block_back(
    requests, num_blocks, budget, slots, depth, stop_at, aborts
):
    scheduler = make_scheduler(num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=slots, eos=(2,))
    made = [make_request(i, prompt, tokens, n) for i, (prompt, tokens, n) in enumerate(requests)]
    for request in made:
        scheduler.add(request)

    def abort_some(output):
        if aborts.get(output.step, 99) < len(made):
            scheduler.abort(made[aborts[output.step]])

    run_all(scheduler, depth, stop_at=stop_at, each_step=abort_some)
    assert scheduler.kv.num_free_blocks == num_blocks
    assert len(scheduler.running) == 0
    assert sorted(scheduler.running._free_slots) == list(range(slots))
    for request in made:
        for sequence in request.sequences:
            assert sequence.status is Status.FINISHED
            assert sequence.num_tokens_in_flight <= depth or sequence.finish_reason == "abort"
            output = sequence.output_token_ids
            if sequence.finish_reason == "length":
                assert len(output) == request.max_tokens
            elif sequence.finish_reason == "stop":
                assert output[-1] == 2
            else:
                assert sequence.finish_reason == "abort"
