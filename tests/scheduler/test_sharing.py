"""Sharing blocks: samples of one prompt, forks and copy-on-write, under all three levels of the audit."""

import pytest
from scheduler_support import books, make_request, make_scheduler
from sharing_support import EOS, Driver, draw

from refimpl.kernels.philox import ROOT_PATH, branch
from refimpl.outputs import ModelRunnerOutput

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def prompt(length, start=1):
    """Tokens that no draw gives, so that only what is meant to be alike is alike."""
    return [100 + start * 1000 + i for i in range(length)]


@DEPTHS
@pytest.mark.parametrize(("length", "copies"), [(5, 2), (8, 0), (1, 2), (4, 0), (7, 2)])
def test_samples_share_their_prompt_and_copy_only_a_partly_filled_block(length, copies, depth):
    """Three samples, blocks of 4: the last block of 5 tokens is copied twice, and its last owner writes in place."""
    driver = Driver(depth=depth)
    driver.add(prompt(length), n=3)
    driver.run()
    assert len(driver.copies) == copies
    assert driver.outputs[0].batch.num_new_tokens == (length, 0, 0), "the prompt is computed once"


def test_four_samples_of_a_thousand_tokens_hold_62_shared_blocks_and_one_each():
    driver = Driver(num_blocks=200, block_size=16, max_num_batched_tokens=2048, max_model_len=2000)
    # A prompt after which no sample ends at once.
    start = next(k for k in range(1, 99) if all(draw(branch(ROOT_PATH, i), prompt(1000, k)) != EOS for i in range(4)))
    request = driver.add(prompt(1000, start), n=4, max_tokens=3)
    driver.step()
    assert {driver.kv.table(sequence.sequence_id) for sequence in request.sequences} == {tuple(range(1, 64))}
    driver.step()
    written = driver.outputs[1]
    assert len(written.copies) == 3, "the last owner of the half-filled block writes in place"
    own = [copy.target for copy in written.copies]
    assert len(set(own)) == 3
    held = {block for s in request.sequences for block in driver.kv.table(s.sequence_id)}
    assert held <= set(range(1, 63)) | {63, *own}, "62 shared blocks, and one of its own for each of the four"
    assert all(driver.kv.table(s.sequence_id)[:62] == tuple(range(1, 63)) for s in request.sequences if not s.finished)
    driver.run()


def test_a_sample_without_a_slot_finds_the_prompt_in_the_prefix_cache():
    driver = Driver(max_num_seqs=2)
    request = driver.add(prompt(9), n=4)
    driver.run()
    assert len({tuple(s.output_token_ids) for s in request.sequences}) == 4
    hits = [hit for output in driver.outputs for hit in output.prefix_hits]
    assert {hit.sequence_id for hit in hits} == {2, 3}
    assert all(len(hit.block_ids) == 2 for hit in hits)


@DEPTHS
@pytest.mark.parametrize("steps", range(1, 7))
def test_a_fork_shares_everything_and_then_goes_its_own_way(steps, depth):
    driver = Driver(depth=depth)
    parent = driver.add(prompt(10), max_tokens=20).sequences[0]
    for _ in range(steps):
        driver.step()
    before = driver.computed
    forks = [driver.fork(parent, max_tokens=9) for _ in range(2)]
    if parent.finished:
        return
    tables = {driver.kv.table(s.sequence_id) for s in [parent, *(fork.sequences[0] for fork in forks)]}
    assert len(tables) == 1, "all blocks are shared"
    driver.step()
    assert driver.computed - before == 3, "each computes its last token alone"
    driver.run()
    assert driver.kv.num_free_blocks == driver.kv.num_blocks


def test_forks_of_one_sequence_differ_from_it_and_from_each_other():
    driver = Driver(max_num_seqs=8)
    parent = driver.add(prompt(6), max_tokens=30).sequences[0]
    driver.step()
    children = [driver.fork(parent, max_tokens=29).sequences[0] for _ in range(3)]
    driver.run()
    texts = [tuple(parent.output_token_ids[1:]), *(tuple(child.output_token_ids) for child in children)]
    assert len(set(texts)) == 4


@DEPTHS
def test_a_fork_of_a_prompt_that_is_half_computed_shares_that_half(depth):
    driver = Driver(max_num_batched_tokens=8, depth=depth)
    parent = driver.add(prompt(20)).sequences[0]
    driver.step()
    while driver.in_flight:
        driver.take_in()
    child = driver.fork(parent).sequences[0]
    assert child.num_computed_tokens == parent.num_computed_tokens == 8
    driver.run()


def test_a_fork_of_one_that_waits_waits_too_and_one_that_is_aborted_before_it_runs_leaves_nothing():
    driver = Driver(max_num_seqs=1)
    running = driver.add(prompt(6), max_tokens=8)
    waiting = driver.add(prompt(6, start=2))
    driver.step()
    driver.fork(waiting.sequences[0])
    late = driver.fork(running.sequences[0])
    assert len(driver.scheduler.waiting) == 3
    driver.abort(late)
    driver.run()
    roomy = Driver()
    parent = roomy.add(prompt(6), max_tokens=8)
    roomy.step()
    roomy.abort(roomy.fork(parent.sequences[0]))
    roomy.run()


@DEPTHS
def test_preempting_one_of_two_sharers_leaves_the_other_its_blocks(depth):
    driver = Driver(depth=depth)
    request = driver.add(prompt(10), n=2, max_tokens=12)
    driver.scheduler.preempt_at(3, "0")
    driver.run()
    assert sum(len(output.preempted) for output in driver.outputs) >= 1
    assert request.finished


def test_a_fork_that_is_preempted_in_its_first_step_leaves_its_slot_to_a_sample_that_joins():
    """The parent needs a block, so the fork gives way; then a prompt is complete, and its second sample takes the slot."""
    driver = Driver(num_blocks=4, block_size=4, max_num_seqs=3, long_prefill_token_threshold=5)
    parent = driver.add([1] * 5)
    driver.add([4] * 6, n=2)
    driver.step()
    fork = driver.fork(parent.sequences[0])
    [preempted] = driver.step().preempted
    assert preempted.sequence_id == fork.sequences[0].sequence_id
    driver.run()


def test_a_fork_ends_the_quiet_of_its_parent():
    """Its last block is shared from then on: its next decode has to look, and one of the two copies the block."""
    scheduler = make_scheduler(block_size=4)
    [parent] = (request := make_request(0, 5, max_tokens=20)).sequences
    scheduler.add(request)
    scheduler.update(scheduler.schedule(), ModelRunnerOutput((1,)))
    assert (parent.num_computed_tokens, parent.quiet_until) == (5, 9), "three more decodes stay within its second block"
    child = make_request(1, list(parent.token_ids), max_tokens=3)
    scheduler.fork(parent, child)
    assert parent.quiet_until == 0
    planned = scheduler.schedule()
    assert [(copy.slot, copy.index) for copy in planned.copies] == [(parent.slot, 1)]
    assert parent.quiet_until == 9
    assert books(scheduler) == []
