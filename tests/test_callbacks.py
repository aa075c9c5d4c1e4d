"""What callbacks (hooks, policies, subscribers) may ask of their own engine, and that the rest is refused at once."""

import asyncio
import gc
import threading

import pytest

from refimpl import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from refimpl.errors import RefimplError, RequestError
from refimpl.scheduler.policies import FirstComeFirstServed

OPTIONS = {"num_gpu_blocks_override": 64, "max_model_len": 200}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
REFUSED = "{} was called within another call of the same engine"
PATIENCE = 240

CALLS = {
    "generate": lambda llm: llm.generate("b", GREEDY, use_tqdm=False),
    "beam_search": lambda llm: llm.beam_search("b", BeamSearchParams(beam_width=2, max_tokens=2), use_tqdm=False),
    "step": lambda llm: llm.engine.step(),
    "step_by_hand": lambda llm: llm.engine.step_by_hand(),
    "add_request": lambda llm: llm.engine.add_request("mine", "b", GREEDY),
    "fork": lambda llm: llm.engine.fork("llm-0", "mine"),
    "reset_prefix_cache": lambda llm: llm.engine.reset_prefix_cache(),
    "read_blocks": lambda llm: llm.engine.read_blocks(0, [1]),
    "close": lambda llm: llm.close(),
}


def in_time(function):
    """What a function returns, in a thread that is given up when it hangs."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(function()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it hangs"
    return answers[0]


def hooked(hook):
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logits_hook=hook)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_hook_that_orders_its_own_engine_fails_alone(name, overlap):
    with LLM("tiny", async_scheduling=overlap, **OPTIONS) as llm:

        def hook(_token_ids, logits):
            CALLS[name](llm)
            return logits

        plain = llm.generate("c", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        bad, good = in_time(lambda: llm.generate(["a", "c"], [hooked(hook), GREEDY], use_tqdm=False))
        assert bad.outputs[0].finish_reason == "error"
        assert REFUSED.format(name) in bad.outputs[0].stop_reason
        assert good.outputs[0].token_ids == plain
        assert llm.generate("c", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == plain
        assert llm.engine.audit() == []


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_subscriber_that_orders_its_own_engine_gets_no_more_events(name, overlap, caplog):
    with LLM("tiny", async_scheduling=overlap, **OPTIONS) as llm:
        plain = llm.generate("c", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        llm.engine.events.subscribe(lambda _record: CALLS[name](llm))
        for _ in range(2):
            assert in_time(lambda: llm.generate("c", GREEDY, use_tqdm=False))[0].outputs[0].token_ids == plain
        assert REFUSED.format(name) in caplog.text
        assert caplog.text.count("gets no more events") == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_policy_that_orders_its_own_engine_ends_what_runs(overlap):
    calls = []

    class Orders(FirstComeFirstServed):
        def key(self, sequence):
            if calls:
                calls.pop()(llm)
            return super().key(sequence)

    with LLM("tiny", async_scheduling=overlap, scheduling_policy=Orders(), **OPTIONS) as llm:
        plain = llm.generate("c", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        for name in ("generate", "step", "add_request", "close"):
            calls.append(CALLS[name])
            with pytest.raises(RefimplError, match=REFUSED.format(name)):
                in_time_or_raise(lambda: llm.generate("c", GREEDY, use_tqdm=False))
            assert llm.generate("c", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == plain
            assert llm.engine.audit() == []


def in_time_or_raise(function):
    def caught():
        try:
            return function(), None
        except Exception as error:
            return None, error

    answer, error = in_time(caught)
    if error is not None:
        raise error
    return answer


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hook_may_abort_its_own_request_and_others(overlap):
    with LLM("tiny", async_scheduling=overlap, **OPTIONS) as llm:
        engine, outputs = llm.engine, []

        def hook(token_ids, logits):
            if len(token_ids) == 5:
                engine.abort(["a", "b", "nobody"])
            return logits

        for request_id, params in (("a", hooked(hook)), ("b", GREEDY), ("c", GREEDY)):
            engine.add_request(request_id, [1, 2, 3], params)

        def steps():
            while engine.has_unfinished_requests():
                outputs.extend(output for output in engine.step() if output.finished)

        in_time(steps)
        assert [output.request_id for output in outputs] == ["c"]
        assert engine.num_aborted == 2
        assert engine.memory_report().usage.used_blocks == 0
        assert engine.audit() == []


def test_what_a_callback_aborts_is_no_later_request_of_the_same_name():
    with LLM("tiny", **OPTIONS) as llm:
        engine = llm.engine
        engine.add_request("a", [1, 2], GREEDY)
        stop = engine.events.subscribe(lambda record: record.aborted and engine.abort("a"))
        engine.step()
        engine.abort("a")  # tells the subscriber, who aborts it again
        stop()
        engine.add_request("a", [1, 2], GREEDY)
        outputs = [output for _ in range(20) if engine.has_unfinished_requests() for output in engine.step()]
        assert outputs[-1].finished
        assert len(outputs[-1].outputs[0].token_ids) == 6


def test_a_hook_may_look_into_its_engine():
    seen = []

    def hook(_token_ids, logits):
        engine = llm.engine
        seen.append((engine.unfinished_request_ids(), engine.prefix_cache_stats, len(engine.events.records)))
        return logits

    with LLM("tiny", async_scheduling=True, **OPTIONS) as llm:
        in_time(lambda: llm.generate("a", hooked(hook), use_tqdm=False))
    assert len(seen) == 6


def test_a_hook_may_use_another_engine():
    with LLM("tiny", async_scheduling=True, **OPTIONS) as llm, LLM("tiny", async_scheduling=True, **OPTIONS) as other:
        seen = []

        def hook(_token_ids, logits):
            seen.append(other.generate("b", GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
            return logits

        in_time(lambda: llm.generate("a", hooked(hook), use_tqdm=False))
        assert seen == [other.generate("b", GREEDY, use_tqdm=False)[0].outputs[0].token_ids] * 6


def test_generate_in_the_midst_of_generate_is_refused():
    """Whoever is called between two steps, in the thread that generates."""
    with LLM("tiny", **OPTIONS) as llm:
        engine, said = llm.engine, []
        step = engine.step

        def between(**options):
            with pytest.raises(RefimplError, match=REFUSED.format("generate")) as refused:
                llm.generate("b", GREEDY, use_tqdm=False)
            said.append(refused)
            return step(**options)

        engine.step = between
        assert in_time(lambda: llm.generate("a", GREEDY, use_tqdm=False))[0].finished
        assert said


ASYNC_CALLS = {
    "generate": lambda llm: llm.generate("b", GREEDY),
    "this": lambda llm: llm.explain("a"),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ASYNC_CALLS)
def test_a_hook_that_waits_for_its_async_engine_fails_alone(name, overlap):
    async def main():
        async with AsyncLLM("tiny", async_scheduling=overlap, **OPTIONS) as llm:

            def hook(_token_ids, logits):
                async def waits():
                    await ASYNC_CALLS[name](llm)

                asyncio.run(waits())
                return logits

            bad, good = await asyncio.gather(llm.generate("a", hooked(hook)), llm.generate("c", GREEDY))
            assert REFUSED.format(name) in bad.outputs[0].stop_reason
            assert len(good.outputs[0].token_ids) == 6
            assert (await llm.generate("c", GREEDY)).outputs[0].token_ids == good.outputs[0].token_ids
            assert await llm.audit() == []

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hook_may_abort_in_an_async_engine(overlap):
    async def main():
        async with AsyncLLM("tiny", async_scheduling=overlap, **OPTIONS) as llm:

            def hook(_token_ids, logits):
                llm.engine.abort("b")
                return logits

            answers = await asyncio.gather(
                llm.generate("a", hooked(hook), "a"), llm.generate("c", GREEDY, "b"), return_exceptions=True
            )
            assert len(answers[0].outputs[0].token_ids) == 6
            assert isinstance(answers[1], RequestError)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["close", "aclose"])
def test_a_hook_that_closes_its_async_engine_does_not_wait_for_it(how, overlap):
    async def main():
        llm = AsyncLLM("tiny", async_scheduling=overlap, **OPTIONS)

        def hook(_token_ids, logits):
            llm.close() if how == "close" else asyncio.run(llm.aclose())
            return logits

        with pytest.raises(RefimplError, match="closed while"):
            await llm.generate("a", SamplingParams(max_tokens=100, ignore_eos=True, logits_hook=hook))
        await llm.aclose()
        assert not llm.engine.is_open

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    gc.collect()
