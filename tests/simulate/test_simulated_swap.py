"""Swap in simulations: transfers take their time by hand, auto is the cheaper of both, books are audited, logs fold."""

import msgspec
import pytest
from test_simulation import small

from refimpl.cache import audit
from refimpl.outputs import Batch, SchedulerOutput
from refimpl.simulate import HARDWARE, Deployment, StepWork
from refimpl.simulate.executor import SimulatedExecutor, VirtualClock
from refimpl.visualizers.history import History

H200 = Deployment.of("llama-3-8b", "h200")
KV_BYTES = 2 * 32 * 8 * 128 * 2
EMPTY = Batch(version=1, sequence_ids=(), slots=(), num_new_tokens=())


def test_swapped_blocks_add_their_bytes_over_the_host_link():
    work = StepWork(tokens=1, rows=1, context=100, pairs=100)
    moved = H200.roofline.times(msgspec.structs.replace(work, swapped=10 * 16))
    assert moved.transfer == pytest.approx(10 * 16 * KV_BYTES / (0.86 * 64e9), rel=1e-12)
    assert moved.seconds == pytest.approx(H200.roofline.times(work).seconds + moved.transfer, rel=1e-12)


def test_a_step_that_only_moves_blocks_takes_its_transfers_alone():
    clock = VirtualClock()
    executor = SimulatedExecutor(H200, 100, 16, clock, num_host_blocks=8)
    executor.submit(SchedulerOutput(0, EMPTY, swapped_out=((1, 1), (2, 2)))).result()
    assert clock.now == pytest.approx(2 * 16 * KV_BYTES / (0.86 * 64e9), rel=1e-12)
    assert executor.busy_seconds == executor.transfer_seconds == clock.now
    assert (executor.blocks_out, executor.blocks_in, executor.memory_bound_seconds) == (2, 0, 0)


def test_each_device_moves_its_own_heads_and_has_its_own_host_memory():
    one, four = (Deployment.of("llama-3-70b", "h200", n, "fp8") for n in (1, 4))
    work = StepWork(tokens=0, rows=0, context=0, pairs=0, swapped=160)
    assert one.roofline.times(work).transfer == pytest.approx(4 * four.roofline.times(work).transfer, rel=1e-12)
    assert four.num_host_blocks(1.0, 16) == 4 * 2**30 // one.block_bytes(16) > one.num_host_blocks(1.0, 16)
    assert one.num_host_blocks(1.0, 16) == 2**30 // one.block_bytes(16)


@pytest.mark.parametrize("hardware", HARDWARE)
def test_costs_are_those_of_the_roofline(hardware):
    deployment = Deployment.of("llama-3-8b", hardware)
    costs = deployment.roofline.preemption_costs()
    work = StepWork(tokens=0, rows=0, context=0, pairs=0, swapped=2 * 1_000)
    assert costs.swap_seconds(1_000) == pytest.approx(deployment.roofline.times(work).transfer, rel=1e-12)
    recompute = deployment.roofline.times(StepWork(1_000, 0, 1_000, 1_000 * 1_001 // 2))
    assert costs.recompute_seconds(1_000) == pytest.approx(recompute.compute, rel=1e-12)
    before, after = (costs.crossover + delta for delta in (-1, 1))
    assert before < 0 or costs.swap_seconds(before) > costs.recompute_seconds(before)
    assert costs.swap_seconds(after) < costs.recompute_seconds(after)


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"enable_prefix_caching": True}], ids=str)
@pytest.mark.parametrize("mode", ["swap", "auto", "recompute"])
def test_swap_is_audited_at_every_step_and_counted_by_kind(mode, options):
    run = small(swap_space=1.0, preemption_mode=mode, **options)
    while run.pending:
        run.step()
        assert audit(run.scheduler.snapshot()) == []
    figures = run.figures()
    kinds = figures["preemptions"]
    assert figures["finished"] == 40
    assert set(kinds) == {"recompute"} if mode == "recompute" else set(kinds) == {"swap"}
    assert figures["blocks_swapped_out"] == figures["blocks_swapped_in"]
    assert (figures["blocks_swapped_out"] > 0) == ("swap" in kinds)
    assert (figures["swap_seconds"] > 0) == ("swap" in kinds)
    assert run.events.header.config["num_host_blocks"] == figures["num_host_blocks"] == 2**30 // H200.block_bytes(16)
    state = History(run.events).last
    assert state.swapped.tables == {}
    assert state.num_finished == 40


def test_the_tokens_are_the_same_whatever_gives_way():
    drawn = []
    for mode in ("swap", "recompute"):
        run = small(swap_space=1.0, preemption_mode=mode)
        tokens = {}
        run.events.subscribe(
            lambda record, tokens=tokens: [
                tokens.setdefault(sequence, []).append(token)
                for sequence, token in zip(record.sequence_ids, record.token_ids, strict=True)
                if token >= 0
            ]
        )
        run.run()
        drawn.append(tokens)
    assert drawn[0] == drawn[1]
