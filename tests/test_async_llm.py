"""AsyncLLM: the same tokens as LLM, streams that merge, and requests that leave, fail and end without hurting others."""

import asyncio
import contextlib
import gc
import logging
import random
import threading
import time

import pytest

from refimpl import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from refimpl.errors import (
    EngineFailedError,
    PolicyError,
    PromptError,
    QueueFullError,
    RefimplError,
    RequestError,
    SamplingParamsError,
)
from refimpl.scheduler.policies import FirstComeFirstServed
from refimpl.visualizers.player import player_of
from refimpl.watchdog import Watchdog

LONG = SamplingParams(max_tokens=1000, ignore_eos=True, output_kind="delta")


@pytest.fixture
def llm():
    before = set(threading.enumerate())
    options = {"max_model_len": 1200, "num_gpu_blocks_override": 200, "enable_prefix_caching": False}
    with AsyncLLM("tiny", dtype="float64", **options) as llm:  # so that what else runs changes no digit that is told
        yield llm
    assert set(threading.enumerate()) <= before


def short(tokens=4, **options):
    return SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, **options)


def idle(llm):
    """Nothing is left: no request, no block in use, and the books are right."""
    return not llm.engine.has_unfinished_requests() and llm.engine.memory_report().usage.used_blocks == 0


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 240))


async def until(true):
    end = time.monotonic() + 240
    while not true():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.002)


def mixed_requests(count=50):
    chosen = random.Random(3)
    return [
        (
            [chosen.randrange(256) for _ in range(chosen.randrange(1, 90))],
            SamplingParams(
                n=chosen.choice((1, 1, 2)),
                temperature=chosen.choice((0, 0.7, 1.3)),
                top_p=chosen.choice((1, 0.8)),
                top_k=chosen.choice((0, 7)),
                seed=chosen.randrange(1000),
                max_tokens=chosen.randrange(1, 24),
                output_kind=chosen.choice(("delta", "cumulative", "final_only")),
            ),
        )
        for _ in range(count)
    ]


async def whole(llm, prompt, params):
    """(text, token ids, finish reason) of each sample, as the stream tells it."""
    text, token_ids, reason = [""] * params.n, [[] for _ in range(params.n)], [None] * params.n
    async for output in llm.generate(prompt, params):
        for sample in output.outputs:
            delta = params.output_kind == "delta"
            text[sample.index] = text[sample.index] * delta + sample.text
            token_ids[sample.index] = token_ids[sample.index] * delta + sample.token_ids
            reason[sample.index] = sample.finish_reason
    return list(zip(text, token_ids, reason, strict=True))


# ---------------------------------------------------------------------- the same as LLM


@pytest.mark.parametrize("overlap", [False, True])
def test_fifty_requests_at_once_are_those_of_llm_token_by_token(overlap):
    requests = mixed_requests()
    options = {"dtype": "float64", "async_scheduling": overlap, "num_gpu_blocks_override": 60, "max_model_len": 200}
    with LLM("tiny", **options) as llm:
        prompts, params = zip(*requests, strict=True)
        expected = [
            [(sample.text, sample.token_ids, sample.finish_reason) for sample in output.outputs]
            for output in llm.generate(list(prompts), list(params), use_tqdm=False)
        ]

    async def main():
        async with AsyncLLM("tiny", **options) as llm:
            got = await asyncio.gather(*(whole(llm, prompt, params) for prompt, params in requests))
            assert await llm.audit() == []
            return got

    assert run(main()) == expected


def test_await_gives_the_last_output_and_a_stream_gives_each(llm):
    async def main():
        output = await llm.generate("Hello", short())
        assert (output.finished, len(output.outputs[0].token_ids)) == (True, 4)
        stream = llm.generate("Hello", short(output_kind="delta"))
        assert [token async for o in stream for token in o.outputs[0].token_ids] == output.outputs[0].token_ids
        assert len((await llm.generate("Hello")).outputs[0].token_ids) <= 16

    run(main())


def test_prompts_come_in_every_form_and_as_messages(llm):
    async def main():
        forms = "Hello", list(b"Hello"), {"prompt": "Hello"}, {"prompt_token_ids": list(b"Hello")}
        outputs = [await llm.generate(form, short()) for form in forms]
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        answer = await llm.chat([{"role": "user", "content": "Hi"}], short())
        with LLM("tiny", dtype="float64") as other:
            [expected] = other.chat([{"role": "user", "content": "Hi"}], short(), use_tqdm=False)
        assert answer.outputs[0].token_ids == expected.outputs[0].token_ids

    run(main())


def test_a_long_text_is_tokenised_outside_the_event_loop_and_refused_like_any_other(llm):
    async def main():
        stream = llm.generate("x" * 30_000, short())
        with pytest.raises(PromptError, match="30"):
            await stream

    run(main())


# ---------------------------------------------------------------------- a slow reader


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
def test_a_slow_reader_gets_merged_outputs_that_are_still_the_whole(llm, kind):
    async def main():
        params = short(60, n=2, output_kind=kind)
        outputs = []
        async for output in llm.generate("Hello", params, "slow"):
            outputs.append(output)
            await until(lambda: not llm.engine.is_unfinished("slow"))
        assert len(outputs) == 2
        expected = await llm.generate("Hello", params)
        for index, sample in enumerate(expected.outputs):
            parts = [o.outputs[index] for o in outputs] if kind == "delta" else [outputs[-1].outputs[index]]
            assert [token for part in parts for token in part.token_ids] == sample.token_ids
            assert "".join(part.text for part in parts) == sample.text
            assert parts[-1].finish_reason == "length"

    run(main())


# ---------------------------------------------------------------------- leaving


def test_a_cancelled_task_ends_its_request_and_no_other(llm):
    async def main():
        async def read():
            async for _ in llm.generate("Hello", LONG, "left"):
                reading.set()

        reading = asyncio.Event()
        other = asyncio.ensure_future(whole(llm, "Other", short(30)))
        task = asyncio.create_task(read())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not llm.engine.is_unfinished("left"))
        assert "abort" in await llm.explain("left")
        assert len((await other)[0][1]) == 30
        assert idle(llm)

    run(main())


@pytest.mark.parametrize("how", ["break", "aclose", "raise", "dropped"])
def test_leaving_a_stream_ends_its_request(llm, how):
    async def leave():
        if how == "break":
            async for _ in llm.generate("Hello", LONG, "r"):
                break
        elif how == "raise":
            with contextlib.suppress(ZeroDivisionError):
                async for _ in llm.generate("Hello", LONG, "r"):
                    raise ZeroDivisionError
        else:
            stream = llm.generate("Hello", LONG, "r")
            await anext(stream)
            if how == "aclose":
                await stream.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)

    async def main():
        llm.engine.gate.allow(3)  # so that it cannot end by itself
        await leave()
        llm.engine.gate.allow(2)
        await until(lambda: idle(llm))
        assert llm.engine.audit() == []

    run(main())


def test_a_request_that_nobody_waited_for_never_begins(llm):
    llm.generate("Hello", LONG, "never")
    assert not llm.engine.is_unfinished("never")
    with pytest.raises(RequestError, match="no request 'never'"):
        llm.engine.explain("never")


@pytest.mark.parametrize("ask", ["llm", "engine"])
def test_whoever_waits_for_an_aborted_request_is_told(llm, ask):
    async def main():
        stream = llm.generate("Hello", LONG, "r")
        await anext(stream)
        if ask == "llm":
            await llm.abort("r")
        else:
            llm.engine.abort("r")
        with pytest.raises(RequestError, match="'r' was aborted while somebody waited"):
            async for _ in stream:
                pass
        assert idle(llm)

    run(main())


def test_a_loop_that_ended_without_its_readers_leaves_no_request(llm):
    stream = llm.generate("Hello", LONG, "r")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(stream))
    loop.close()
    run(until(lambda: not llm.engine.is_unfinished("r")))
    assert "abort" in llm.engine.explain("r")


# ---------------------------------------------------------------------- what fails


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("", short()), PromptError),
        (([1, 999],), PromptError),
        ((5,), PromptError),
        (("Hello", {"n": 1}), RequestError),
        (("Hello", short(), 7), RequestError),
        (({"text": "Hello"},), RequestError),
    ],
)
def test_a_bad_request_raises_at_once_and_alone(llm, arguments, error):
    async def main():
        other = asyncio.ensure_future(whole(llm, "Other", short(30)))
        await asyncio.sleep(0)
        with pytest.raises(error):
            llm.generate(*arguments)
        assert len((await other)[0][1]) == 30

    run(main())


def test_what_only_the_engine_knows_is_raised_when_the_first_output_is_waited_for():
    async def main():
        options = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_num_queued_reqs": 1, "max_model_len": 64}
        async with AsyncLLM("tiny", **options) as llm:
            first = llm.generate("Hello", LONG, "same")
            llm.engine.gate.allow(1)
            await anext(first)
            with pytest.raises(RequestError, match="'same' is in use"):
                await llm.generate("Hello", short(), "same")
            with pytest.raises(PromptError):
                await llm.generate([1] * 64, short())
            second = asyncio.ensure_future(llm.generate("Hello", short(1)))
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await llm.generate("Hello", short())
            assert llm.engine.is_unfinished("same")
            llm.engine.gate.open()
            assert (await anext(first)).request_id == "same"
            await first.aclose()
            assert (await second).finished

    run(main())


class FailsAtTheThirdChoice(FirstComeFirstServed):
    """A policy that cannot be followed from some moment on."""

    name = "fails"
    dynamic = True
    steps = 0

    def computed(self, sequence, num_tokens):
        self.steps += 1
        if self.steps == 3:
            raise ZeroDivisionError("planted")


def test_a_failing_engine_is_told_to_everybody_and_goes_on(caplog):
    async def main():
        policy = FailsAtTheThirdChoice()
        async with AsyncLLM("tiny", scheduling_policy=policy, max_num_seqs=1, async_scheduling=False) as llm:
            with caplog.at_level(logging.CRITICAL, "refimpl"):
                ends = await asyncio.gather(*(llm.generate("Hello", LONG) for _ in range(3)), return_exceptions=True)
            assert [type(end) for end in ends] == [EngineFailedError] * 3
            assert all(isinstance(end.__cause__, PolicyError | ZeroDivisionError) for end in ends)
            assert len({id(end) for end in ends}) == 3
            assert (await llm.generate("Hello", short())).finished
            assert await llm.audit() == []

    run(main())


def test_a_step_that_cannot_be_computed_ends_its_request_with_an_error(llm, monkeypatch, caplog):
    def forward(*_arguments, **_options):
        raise RuntimeError("planted")

    async def main():
        with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL, "refimpl"):
            patch.setattr(llm.engine.executor.runner.model, "forward", forward)
            output = await llm.generate("Hello", short())
        assert output.outputs[0].finish_reason == "error"
        assert "planted" in output.outputs[0].stop_reason
        assert (await llm.generate("Hello", short())).outputs[0].finish_reason == "length"

    run(main())


# ---------------------------------------------------------------------- closing


def test_who_waits_when_it_is_closed_is_told_and_what_comes_later_is_refused():
    async def main():
        before = set(threading.enumerate())
        llm = AsyncLLM("tiny")
        stream = llm.generate("Hello", LONG)
        await anext(stream)
        waiting = asyncio.ensure_future(llm.generate("Hello", LONG)._whole())
        await asyncio.sleep(0)
        await llm.aclose()
        await llm.aclose()
        llm.close()
        with pytest.raises(RefimplError, match="closed while"):
            [output async for output in stream]
        with pytest.raises(RefimplError, match="closed"):
            await waiting
        with pytest.raises(RefimplError, match="this engine is closed"):
            llm.generate("Hello")
        with pytest.raises(RefimplError, match="this engine is closed"):
            await llm.audit()
        assert set(threading.enumerate()) <= before

    run(main())


def test_one_that_is_dropped_gives_its_threads_and_memory_back():
    before = set(threading.enumerate())
    llm = AsyncLLM("tiny", async_scheduling=True)
    run(_generate_once(llm))
    storage = llm.engine.executor.runner.kv_cache.layers[0].k.untyped_storage()
    del llm
    gc.collect()
    assert set(threading.enumerate()) <= before
    assert storage.size() == 0


async def _generate_once(llm):
    return await llm.generate("Hello", short())


def test_a_stream_keeps_its_llm_alive():
    output = run(_generate_once(AsyncLLM("tiny")))
    assert output.finished


def test_an_idle_one_takes_no_processor_time(llm):
    run(_generate_once(llm))
    clock = time.pthread_getcpuclockid(llm.step_thread._thread.ident)

    def used(seconds):
        before = time.clock_gettime(clock)
        time.sleep(seconds)
        return time.clock_gettime(clock) - before

    left_to_do = (used(0.2) for _ in range(150))  # how long that takes is the machine's affair
    assert 0 in left_to_do


# ---------------------------------------------------------------------- held, forked, looked into


def test_a_held_engine_still_takes_commands_and_steps_by_hand(llm):
    async def main():
        llm.engine.gate.close()
        stream = llm.generate("Hello", LONG, "held")
        waiting = asyncio.ensure_future(anext(stream))
        await until(lambda: llm.engine.gate.num_waiting == 1)
        with pytest.raises(PromptError):
            await llm.generate([1] * 5000, short())
        assert "waits at the head" in await llm.explain("held")
        assert not waiting.done()
        llm.engine.step_by_hand()
        assert len((await waiting).outputs[0].token_ids) == 1
        await llm.abort("held")
        with pytest.raises(RequestError, match="aborted"):
            await anext(stream)
        llm.engine.gate.open()
        assert (await llm.generate("Hello", short())).finished

    run(main())


def test_a_held_engine_can_be_closed():
    async def main():
        async with AsyncLLM("tiny") as llm:
            llm.engine.gate.close()
            waiting = asyncio.ensure_future(llm.generate("Hello", LONG)._whole())
            await until(lambda: llm.engine.gate.num_waiting == 1)
        with pytest.raises(RefimplError, match="closed"):
            await waiting

    run(main())


def test_a_branch_is_a_stream_of_its_own(llm):
    async def main():
        stream = llm.generate("Hello", short(40, output_kind="delta"), "parent")
        taken = (await anext(stream)).outputs[0].token_ids
        llm.engine.gate.close()
        branch = await llm.fork("parent", "child", short(5, output_kind="delta"))
        llm.engine.gate.open()
        tokens = [token async for output in branch for token in output.outputs[0].token_ids]
        assert len(tokens) == 5
        rest = [token async for output in stream for token in output.outputs[0].token_ids]
        assert len(taken + rest) == 40
        with pytest.raises(RequestError, match="no unfinished request 'parent'"):
            await llm.fork("parent")
        assert await llm.audit() == []

    run(main())


def test_reports_come_between_steps_and_widgets_follow(llm):
    async def main():
        player = player_of(llm.engine.events, llm.engine)
        stream = llm.generate("Hello", LONG)
        await anext(stream)
        report = await llm.memory_report()
        assert report.usage.num_sequences == 1
        assert await llm.audit() == []
        await llm.reset_prefix_cache()
        await stream.aclose()
        player.catch_up()
        assert len(player.history) > 0

    run(main())


# ---------------------------------------------------------------------- many


def test_event_loops_in_several_threads_share_one_engine(llm):
    got, expected = {}, run(whole(llm, "Hello", short(12)))

    def in_thread(number):
        async def main():
            return await asyncio.gather(*(whole(llm, "Hello", short(12)) for _ in range(5)))

        got[number] = run(main())

    threads = [threading.Thread(target=in_thread, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: [expected] * 5 for number in range(3)}


@pytest.mark.parametrize("overlap", [False, True])
def test_random_leaving_forking_and_aborting_leaves_nothing_behind(overlap):
    chosen = random.Random(11)

    async def client(llm, number):
        name = f"{number}"
        params = SamplingParams(
            max_tokens=chosen.randrange(1, 60), n=chosen.choice((1, 2)), output_kind=chosen.choice(("delta", "cumulative"))
        )
        stream = llm.generate([number % 256] * chosen.randrange(1, 60), params, name, cache_salt=chosen.choice((None, "a")))
        leave_after = chosen.randrange(1, 30)
        with contextlib.suppress(RequestError):
            async for output in stream:
                leave_after -= 1
                match chosen.randrange(12):
                    case 0:
                        await llm.abort(str(chosen.randrange(60)))
                    case 1:
                        branch = await llm.fork(name, f"{name}+", SamplingParams(max_tokens=5))
                        await anext(branch)
                    case 2:
                        await asyncio.sleep(0.001)
                if leave_after == 0 or output.finished:
                    break
            await stream.aclose()

    async def main():
        options = {"num_gpu_blocks_override": 24, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
        async with AsyncLLM("tiny", async_scheduling=overlap, **options) as llm:
            tasks = [asyncio.create_task(client(llm, number)) for number in range(60)]
            for _ in range(15):
                await asyncio.sleep(0.003)
                chosen.choice(tasks).cancel()
                assert await llm.audit() == []
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(end) for end in ends} <= {type(None), asyncio.CancelledError}
            await until(lambda: not llm.engine.has_unfinished_requests())
            assert await llm.audit() == []
            assert (await llm.memory_report()).usage.used_blocks == 0
            assert llm.step_thread._mailboxes == {}

    run(main())


# ---------------------------------------------------------------------- the watchdog


def test_a_stuck_step_is_told_once_for_each_doubling_with_where_it_is(caplog):
    watchdog = Watchdog(patience=0.03)

    def stuck_here():
        watchdog.begin()
        while len(caplog.records) < 2:
            time.sleep(0.005)
        watchdog.end()

    with caplog.at_level(logging.WARNING, "refimpl"):
        stuck_here()
        watchdog.close()
    assert all("has not ended" in record.message and "stuck_here" in record.message for record in caplog.records)


def test_steps_that_end_are_not_told(caplog):
    watchdog = Watchdog(patience=0.05)
    for _ in range(20):
        watchdog.begin()
        time.sleep(0.005)
        watchdog.end()
    watchdog.close()
    assert caplog.records == []


SEARCH = BeamSearchParams(beam_width=3, max_tokens=12)


def test_a_search_gives_what_llm_gives_best_first_beside_other_requests(llm):
    with LLM("tiny", dtype="float64") as other:
        [wanted] = other.beam_search("Hello", SEARCH, use_tqdm=False)
    scores = [sample.score for sample in wanted.outputs]
    assert scores == sorted(scores, reverse=True)

    async def main():
        sampled = asyncio.create_task(whole(llm, "you", short(30)))
        once = await llm.beam_search("Hello", SEARCH)
        streamed = [output async for output in llm.beam_search({"prompt": "Hello"}, SEARCH, "named")]
        assert len(streamed) == 1
        assert streamed[0].request_id == "named"
        await sampled
        return once, streamed[0]

    for output in run(main()):
        assert output.finished
        assert [sample.index for sample in output.outputs] == [0, 1, 2]
        assert [sample.token_ids for sample in output.outputs] == [sample.token_ids for sample in wanted.outputs]
        assert [sample.score for sample in output.outputs] == pytest.approx(scores, abs=1e-6)
    assert idle(llm)


def test_whoever_leaves_a_search_aborts_all_of_its_beams_and_nothing_else(llm):
    long = BeamSearchParams(beam_width=4, max_tokens=1000, ignore_eos=True)

    async def main():
        beside = asyncio.create_task(whole(llm, "you", short(60)))
        searching = asyncio.ensure_future(_wait(llm.beam_search("Hello", long, "s")))
        await until(lambda: len(llm.engine.scheduler.running) == 5)
        searching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await searching
        await until(lambda: not llm.engine.is_unfinished("s"))
        assert len(await beside) == 1
        told = asyncio.ensure_future(_wait(llm.beam_search("Hello", long, "t")))
        await until(lambda: len(llm.engine.scheduler.running) == 4)
        await llm.abort("t")
        with pytest.raises(RequestError, match="was aborted"):
            await told

    run(main())
    assert idle(llm)
    assert llm.engine.audit() == []


async def _wait(stream):
    return await stream


def test_a_search_and_samples_are_not_taken_for_each_other(llm):
    with pytest.raises(RequestError, match="params is a SamplingParams; it must be a BeamSearchParams"):
        llm.beam_search("Hello", short())
    for ask in (llm.generate, lambda text, params: llm.chat([{"role": "user", "content": text}], params)):
        with pytest.raises(RequestError, match="call beam_search with it"):
            ask("Hello", SEARCH)
    with LLM("tiny") as other, pytest.raises(RequestError, match="call beam_search with it"):
        other.generate("Hello", SEARCH, use_tqdm=False)

    with AsyncLLM("tiny", max_num_seqs=2) as narrow, pytest.raises(SamplingParamsError, match="only max_num_seqs = 2"):
        narrow.beam_search("Hello", SEARCH)
    assert idle(llm)
