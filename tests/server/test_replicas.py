"""Replicas: several engines behind one interface; what is lost with one, and what goes on."""

import asyncio
import gc

import pytest

from refimpl import BeamSearchParams, SamplingParams
from refimpl.errors import ConfigError, EngineFailedError, RequestError
from refimpl.server.replica import FAILURES, options_by_replica
from refimpl.server.router import Replicas

TINY = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 8}
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def run(test, size=2, **options):
    async def whole():
        async with Replicas("tiny", data_parallel_size=size, **(TINY | options)) as llm:
            return await asyncio.wait_for(test(llm), 60)

    return asyncio.run(whole())


def prompt(number):
    return [3 + number] * 9 + [number, 7, 9]


def served(llm):
    return [engine._intake._num_requests for engine in llm.engines]


def test_requests_are_spread_and_each_is_answered_as_by_one_engine():
    async def test(llm):
        outputs = await asyncio.gather(*(llm.generate(prompt(n), GREEDY) for n in range(24)))
        again = await asyncio.gather(*(llm.generate(prompt(n), GREEDY) for n in range(24)))
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in again]
        assert len({o.request_id for o in (*outputs, *again)}) == 48
        assert all(o.num_cached_tokens >= 8 for o in again), "each went to the replica that has its prefix"
        assert min(served(llm)) > 0
        assert sum(served(llm)) == 48
        assert set(llm.loads().values()) == {0}

    run(test, size=3)


def test_replicas_draw_apart_and_a_seed_means_the_same_on_each():
    made = options_by_replica({"model": "tiny", "device": "cpu", "seed": 5}, 3)
    assert made[0]["seed"] == 5
    assert len({one["seed"] for one in made}) == 3

    async def test(llm):
        params = SamplingParams(max_tokens=8, seed=11, ignore_eos=True)
        found = [await member.llm.generate("Hello there", params) for member in llm.members]
        assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids

    run(test)


def test_streams_texts_chats_searches_and_forks_work_through_it():
    async def test(llm):
        pieces = [o async for o in llm.generate("Hello", SamplingParams(max_tokens=5, output_kind="delta", ignore_eos=True))]
        assert sum(len(o.outputs[0].token_ids) for o in pieces) == 5
        found = await llm.beam_search("Hello", BeamSearchParams(beam_width=2, max_tokens=4))
        assert len(found.outputs) == 2
        parent = llm.generate([5, 6, 7, 8, 9], SamplingParams(max_tokens=60, ignore_eos=True, output_kind="delta"), "parent")
        await anext(parent)
        branch = await llm.fork("parent", "branch")
        assert llm._owners["branch"] is llm._owners["parent"]
        await anext(branch)
        await branch.aclose()
        await parent.aclose()
        assert "on replica" in await llm.explain("parent")
        assert await llm.audit() == []
        assert (await llm.memory_report()).usage.num_blocks == 64
        await llm.reset_prefix_cache()
        assert set(llm.loads().values()) == {0}

    run(test)


def test_an_id_is_in_use_on_all_replicas():
    async def test(llm):
        first = llm.generate(prompt(1), SamplingParams(max_tokens=200, ignore_eos=True, output_kind="delta"), "same")
        await anext(first)
        for number in range(6):
            with pytest.raises(RequestError, match="in use"):
                await llm.generate(prompt(number), GREEDY, "same")
        await llm.abort("same")
        with pytest.raises(RequestError, match="aborted"):
            async for _ in first:
                pass
        assert (await llm.generate(prompt(1), GREEDY, "same")).finished

    run(test)


def test_a_replica_that_is_lost_takes_its_requests_with_it_and_gets_no_more():
    async def test(llm):
        long = SamplingParams(max_tokens=200, ignore_eos=True, output_kind="delta")
        streams = [llm.generate(prompt(n), long) for n in range(12)]
        for stream in streams:
            await anext(stream)
        dead = streams[0]._replica
        lost = [stream for stream in streams if stream._replica is dead]
        assert 0 < len(lost) < 12
        dead.llm.close()
        for stream in streams:
            if stream in lost:
                with pytest.raises(Exception, match="closed"):
                    async for _ in stream:
                        pass
            else:
                assert (await anext(stream)).outputs
                await stream.aclose()
        assert dead.name not in llm.loads()
        before = served(llm)
        outputs = await asyncio.gather(*(llm.generate(prompt(n), GREEDY) for n in range(12)))
        assert all(output.finished for output in outputs)
        after = served(llm)
        assert after[int(dead.name)] == before[int(dead.name)]
        assert llm.trouble() is None
        for member in llm.members:
            member.llm.close()
        assert "closed" in llm.trouble()
        with pytest.raises(EngineFailedError, match="no replica is left"):
            await llm.generate(prompt(0), GREEDY)

    run(test)


def test_a_replica_whose_steps_fail_is_given_up_and_one_whose_requests_are_wrong_is_not():
    async def test(llm):
        sick = llm.members[0]

        def fail(_output):
            raise RuntimeError("the device is gone")

        for _ in range(2 * FAILURES):  # what a request brings upon itself
            output = await llm.generate([5, 6], SamplingParams(max_tokens=3, allowed_token_ids=[9], bad_words=["x"]))
            assert output.finished
        assert sick.failures == 0
        sick.llm.engine.executor.submit = fail
        failed = 0
        for number in range(40):
            try:
                output = await llm.generate(prompt(number), GREEDY)
                failed += output.outputs[0].finish_reason == "error"
            except EngineFailedError:
                failed += 1
        assert failed == FAILURES
        assert list(llm.loads()) == ["1"]
        assert llm.trouble() is None

    run(test)


def test_whoever_drops_a_stream_frees_its_place():
    async def test(llm):
        stream = llm.generate(prompt(1), SamplingParams(max_tokens=200, ignore_eos=True, output_kind="delta"))
        await anext(stream)
        assert sum(llm.loads().values()) == 1
        del stream
        gc.collect()
        assert sum(llm.loads().values()) == 0
        assert not llm._owners
        task = asyncio.create_task(anext(llm.generate(prompt(2), SamplingParams(max_tokens=500, output_kind="final_only"))))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sum(llm.loads().values()) == 0

    run(test)


def test_a_size_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="data_parallel_size is 0"):
        Replicas("tiny", data_parallel_size=0)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2; one process serves one of the two"):
        Replicas("tiny", data_parallel_size=2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="unknown engine option"):
        Replicas("tiny", data_parallel_size=2, blok_size=4)
