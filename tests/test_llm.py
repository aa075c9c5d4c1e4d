"""LLM, as a user of vLLM expects it: prompts of every kind, order, refusals, interrupts, closing; and output kinds."""

import gc
import signal
import threading
import time
import weakref

import pytest
import torch

from refimpl import LLM, Engine, EngineArgs, GenerationInterrupted, SamplingParams
from refimpl.errors import ConfigError, PromptError, RefimplError, RequestError, UnknownOptionError

GREEDY = SamplingParams(temperature=0, max_tokens=6)
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["depth 0", "depth 1"])


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", dtype="float32") as llm:  # in 16 bits, a product of one token rounds otherwise than one of five
        yield llm


def tokens(outputs):
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def generate(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def assert_idle(llm):
    """Nothing is left in the engine: no request, no block, no slot."""
    engine = llm.engine
    assert engine.audit() == []
    assert engine.scheduler.kv.num_free_blocks == engine.scheduler.kv.num_blocks
    assert len(engine.scheduler.running) == 0
    assert len(engine.scheduler.waiting) == 0
    while engine.has_unfinished_requests():  # a step in flight whose tokens nobody wants
        assert engine.step() == []


# ---------------------------------------------------------------------- prompts and parameters


def test_a_prompt_in_every_form(llm):
    ids = list(b"Hello")
    forms = ["Hello", ids, {"prompt": "Hello"}, {"prompt_token_ids": ids}, {"prompt": "Hello", "prompt_token_ids": ids}]
    alone = [generate(llm, form) for form in forms]
    assert [len(outputs) for outputs in alone] == [1] * 5
    together = generate(llm, forms)
    assert tokens(together) == [tokens(outputs)[0] for outputs in alone] == [tokens(alone[0])[0]] * 5
    assert [output.prompt for output in together] == ["Hello", None, "Hello", None, None]
    assert all(output.prompt_token_ids == ids and output.finished for output in together)
    assert tokens(generate(llm, tuple(forms))) == tokens(together)
    assert tokens(generate(llm, (form for form in forms))) == tokens(together)


def test_no_prompts_no_outputs(llm):
    assert llm.generate([], use_tqdm=False) == []


def test_order_is_kept(llm):
    """Prompts that end in another order than they begin."""
    prompts = [f"prompt {i} " * (20 - i) for i in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (i * 7) % 20, ignore_eos=True) for i in range(20)]
    outputs = generate(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [p.max_tokens for p in params]
    assert len({output.request_id for output in outputs}) == 20


def test_default_parameters(llm):
    [output] = llm.generate("Hello", use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_n_samples(llm):
    [output] = generate(llm, "Hello", SamplingParams(n=4, seed=7, max_tokens=8, ignore_eos=True))
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    [first] = generate(llm, "Hello", SamplingParams(n=1, seed=7, max_tokens=8, ignore_eos=True))
    assert first.outputs[0].token_ids == output.outputs[0].token_ids
    assert [len(times) for times in output.metrics.token_times] == [8] * 4


def test_a_seed_means_the_same_alone_and_in_a_batch(llm):
    params = [SamplingParams(seed=i, max_tokens=10) for i in range(5)]
    together = generate(llm, ["Hello"] * 5, params)
    assert tokens(together) == [tokens(generate(llm, "Hello", one))[0] for one in params]
    assert len({tuple(t[0]) for t in tokens(together)}) == 5


def test_without_a_seed_the_engines_seed_decides():
    def run(seed):
        with LLM("tiny", seed=seed) as llm:
            return tokens(generate(llm, ["Hello"] * 3, SamplingParams(max_tokens=10)))

    first = run(0)
    assert first == run(0)
    assert first != run(1)
    assert len({tuple(t[0]) for t in first}) == 3


def test_the_text_is_what_its_tokens_decode_to(llm):
    [output] = generate(llm, "Hello", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids)


def test_stop_token_ids_and_eos(llm):
    [free] = generate(llm, "Hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    ids = free.outputs[0].token_ids
    assert free.outputs[0].finish_reason == "length"
    stop = next(t for i, t in enumerate(ids) if i > 2 and t not in ids[:i])
    [stopped] = generate(llm, "Hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop]))
    sample = stopped.outputs[0]
    assert sample.token_ids == ids[: ids.index(stop) + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)


def test_max_tokens_none_goes_to_max_model_len():
    with LLM("tiny", max_model_len=40) as llm:
        [output] = generate(llm, "Hello", SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 35
        assert output.outputs[0].finish_reason == "length"


# ---------------------------------------------------------------------- chat


def test_chat(llm):
    conversation = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    [output] = llm.chat(conversation, GREEDY, use_tqdm=False)
    text = "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert tokens([output]) == tokens(generate(llm, output.prompt_token_ids))
    several = llm.chat([conversation, conversation[1:]], [GREEDY, GREEDY], use_tqdm=False)
    assert tokens(several)[0] == tokens([output])[0]
    assert len(several) == 2
    [open_ended] = llm.chat(conversation, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert open_ended.prompt_token_ids == output.prompt_token_ids[:-1]


@pytest.mark.parametrize("messages", [[], [[]], ["hi"], "hi", [{"role": "user"}], [{"content": "hi"}], [[{"role": "user"}]]])
def test_bad_chats(llm, messages):
    with pytest.raises(RequestError):
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert_idle(llm)


# ---------------------------------------------------------------------- refusals

BAD_PROMPTS = [
    "",
    [],
    [320],
    [-1],
    [1, 2**70],
    ["a", 5],
    [1.5],
    None,
    7,
    {"prompt": ""},
    {"prompt": 5},
    {"prompt": [1, 2]},
    {"prompt_token_ids": "abc"},
    {"prompt_token_ids": []},
    {"text": "Hello"},
    {},
    "x" * 3000,
    [1] * 2048,
    "\ud800",
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda prompt: repr(prompt)[:30])
def test_a_bad_prompt_is_refused_with_the_others(llm, prompt):
    with pytest.raises(RequestError) as raised:
        generate(llm, ["good", prompt, "good"])
    assert len(str(raised.value)) < 400
    assert_idle(llm)
    assert len(generate(llm, "good")) == 1  # the engine goes on


def test_a_refusal_says_which_prompt_and_why(llm):
    with pytest.raises(PromptError, match=r"^prompt 1 of 2: token id 320 at position 2.*ids go from 0 to 319"):
        generate(llm, [[1], [0, 319, 320]])
    with pytest.raises(PromptError, match=r"^token id -1 at position 0") as raised:
        generate(llm, [-1])
    assert raised.value.numbers == {"token_id": -1, "vocab_size": 320}
    with pytest.raises(PromptError, match=r"2048 tokens.*at most 2047 fit max_model_len = 2048"):
        generate(llm, [[1] * 2048])


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY] * 3, [], {"temperature": 0}, "greedy", [GREEDY, None], 5])
def test_bad_sampling_params(llm, params):
    with pytest.raises(RequestError, match="sampling_params"):
        generate(llm, ["one", "two"], params)
    assert_idle(llm)


def test_bad_options():
    with pytest.raises(UnknownOptionError, match=r"block_sizes.*block_size"):
        LLM("tiny", block_sizes=4)
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM("tiny", max_model_len=4096)


def test_a_row_of_nan_fails_alone():
    """A model whose logits are no numbers after one token: that request ends with an error, the other goes on."""
    with LLM("tiny") as llm:
        model = llm.engine.executor.runner.model
        model.embed_tokens[65] = torch.nan
        good = tokens(generate(llm, "good"))
        bad, fine = generate(llm, ["bAd", "good"])
        assert bad.outputs[0].finish_reason == "error"
        assert "logits" in bad.outputs[0].stop_reason
        assert bad.outputs[0].token_ids == []
        assert tokens([fine]) == good
        assert_idle(llm)


# ---------------------------------------------------------------------- interrupts


@OVERLAP
@pytest.mark.parametrize("after", [1, 2, 7])
def test_ctrl_c_ends_the_call_and_leaves_the_engine(overlap, after):
    with LLM("tiny", async_scheduling=overlap, max_model_len=600) as llm:
        expected = tokens(generate(llm, "Hello"))
        handler, steps = signal.getsignal(signal.SIGINT), []

        def interrupt(_record):
            steps.append(_record)
            if len(steps) == after:
                signal.raise_signal(signal.SIGINT)

        unsubscribe = llm.engine.events.subscribe(interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["one", "two"], SamplingParams(max_tokens=500, ignore_eos=True))
        unsubscribe()
        assert after <= len(steps) <= after + 2
        assert signal.getsignal(signal.SIGINT) is handler
        assert_idle(llm)
        assert tokens(generate(llm, "Hello")) == expected


@OVERLAP
def test_ctrl_c_loses_no_prompt_that_had_finished(overlap):
    """Nor what it brought for requests that others had added to the engine."""
    with LLM("tiny", async_scheduling=overlap, max_model_len=600) as llm:
        short, long = SamplingParams(temperature=0, max_tokens=3), SamplingParams(max_tokens=500, ignore_eos=True)
        expected = tokens(generate(llm, ["one", "two"], short))
        llm.engine.add_request("another's", "one", short)
        interrupt = lambda record: signal.raise_signal(signal.SIGINT) if len(record.finished) == 3 else None  # noqa: E731
        unsubscribe = llm.engine.events.subscribe(interrupt)
        with pytest.raises(GenerationInterrupted, match="2 of 3 prompts had finished") as caught:
            generate(llm, ["one", "long", "two"], [short, long, short])
        unsubscribe()
        one, none, two = caught.value.outputs
        assert (tokens([one, two]), none) == (expected, None)
        *_, output = llm.engine.step()
        assert (output.request_id, tokens([output])) == ("another's", expected[:1])
        assert_idle(llm)


def test_ctrl_c_from_outside():
    """A signal while the main thread computes, as a terminal sends it."""
    with LLM("tiny", max_model_len=2000) as llm:
        started = threading.Event()
        llm.engine.events.subscribe(lambda _record: started.set())
        main = threading.main_thread().ident
        sender = threading.Thread(target=lambda: (started.wait(240), signal.pthread_kill(main, signal.SIGINT)))
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["x"] * 8, SamplingParams(max_tokens=1900, ignore_eos=True))
        sender.join()
        assert_idle(llm)


def test_a_handler_of_ones_own_is_left_alone():
    calls = []
    previous = signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    try:
        with LLM("tiny") as llm:
            llm.engine.events.subscribe(lambda record: signal.raise_signal(signal.SIGINT) if record.step == 0 else None)
            assert len(generate(llm, "Hello")) == 1
    finally:
        signal.signal(signal.SIGINT, previous)
    assert calls == [1]


def test_generate_in_another_thread(llm):
    results = []
    threads = [threading.Thread(target=lambda: results.append(tokens(generate(llm, "Hello")))) for _ in range(1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tokens(generate(llm, "Hello"))]


# ---------------------------------------------------------------------- closing


@OVERLAP
def test_close_leaves_no_thread_and_no_memory(overlap):
    before = set(threading.enumerate())
    llm = LLM("tiny", async_scheduling=overlap)
    generate(llm, "Hello")
    reader = overlap and torch.cuda.is_available()  # waits for a GPU's tokens
    assert len(set(threading.enumerate()) - before) == overlap + reader
    runner = llm.engine.executor.runner
    tensors = [*runner.model.parameters(), *(t for layer in runner.kv_cache.layers for t in (layer.k, layer.v))]
    watched = weakref.ref(runner)
    del runner
    llm.close()
    llm.close()
    assert set(threading.enumerate()) <= before
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    gc.collect()
    assert watched() is None


@OVERLAP
def test_close_in_the_middle(overlap):
    llm = LLM("tiny", async_scheduling=overlap)
    llm.engine.add_request("a", "Hello", SamplingParams(max_tokens=100, ignore_eos=True))
    llm.engine.step()
    llm.close()
    assert not llm.engine.has_unfinished_requests()
    assert "abort" in llm.engine.explain("a")


def test_after_close(llm):
    closed = LLM("tiny")
    closed.close()
    for call in (
        lambda: generate(closed, "Hello"),
        lambda: closed.chat([{"role": "user", "content": "Hi"}], use_tqdm=False),
    ):
        with pytest.raises(RefimplError, match="closed"):
            call()
    with pytest.raises(RefimplError, match="closed"):
        closed.engine.step()
    closed.engine.abort("a")


def test_the_context_manager_closes_after_an_error():
    with pytest.raises(ZeroDivisionError), LLM("tiny") as llm:
        raise ZeroDivisionError
    with pytest.raises(RefimplError, match="closed"):
        generate(llm, "Hello")


def test_two_engines_in_one_process(llm):
    with LLM("tiny", block_size=8) as other:
        assert tokens(generate(other, "Hello")) == tokens(generate(llm, "Hello"))
    assert len(generate(llm, "Hello")) == 1


def test_torch_is_left_as_it_was():
    before = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    with LLM("tiny") as llm:
        generate(llm, "Hello")
    after = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    assert after == before


def test_progress_is_shown_on_stderr(llm, capsys):
    llm.generate(["a", "b"], GREEDY)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Processed prompts" in captured.err
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------------- output kinds, through Engine


def outputs_of(kind, overlap, **params):
    engine = Engine(EngineArgs(model="tiny", async_scheduling=overlap))
    engine.add_request("a", "Hello", SamplingParams(output_kind=kind, ignore_eos=True, seed=3, **params))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    engine.close()
    return outputs


@OVERLAP
def test_output_kinds_tell_the_same(overlap):
    cumulative, delta, final = (
        outputs_of(kind, overlap, n=2, max_tokens=12) for kind in ("cumulative", "delta", "final_only")
    )
    assert [output.finished for output in cumulative] == [False] * 11 + [True]
    assert len(delta) == 12
    assert [output.finished for output in final] == [True]
    for index in range(2):
        whole = final[0].outputs[index]
        assert len(whole.token_ids) == 12
        assert cumulative[-1].outputs[index] == whole
        steps = [output.outputs[index] for output in cumulative]
        assert [len(step.token_ids) for step in steps] == list(range(1, 13))
        assert all(whole.token_ids[: len(step.token_ids)] == step.token_ids for step in steps)
        assert all(whole.text.startswith(step.text) for step in steps)
        pieces = [output.outputs[index] for output in delta]
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
        assert "".join(piece.text for piece in pieces) == whole.text
        assert pieces[-1].finish_reason == "length"


@OVERLAP
def test_deltas_of_samples_that_end_apart(overlap):
    """One sample stops early: its later deltas are empty, and nothing of it is told twice."""
    final = outputs_of("final_only", overlap, n=2, max_tokens=12)[0]
    stop = final.outputs[0].token_ids[2]
    delta = outputs_of("delta", overlap, n=2, max_tokens=12, stop_token_ids=[stop])
    whole = outputs_of("final_only", overlap, n=2, max_tokens=12, stop_token_ids=[stop])[0]
    for index in range(2):
        samples = [sample for output in delta for sample in output.outputs if sample.index == index]
        assert [token for sample in samples for token in sample.token_ids] == whole.outputs[index].token_ids
        assert "".join(sample.text for sample in samples) == whole.outputs[index].text
        assert [sample.finished for sample in samples].count(True) == 1
    assert len(whole.outputs[0].token_ids) <= 3


def test_metrics(llm):
    before = time.monotonic()
    [output] = generate(llm, "Hello")
    metrics = output.metrics
    assert before <= metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
    assert metrics.first_token_time == metrics.token_times[0][0]
    assert metrics.token_times[0] == sorted(metrics.token_times[0])
    assert metrics.token_times[0][-1] <= metrics.finished_time <= time.monotonic()


def test_the_engines_own_requests_and_those_of_generate_do_not_mix():
    with LLM("tiny", num_gpu_blocks_override=64, max_model_len=200) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        llm.engine.add_request("0", "mine", params)
        [output] = llm.generate("Hello", params, use_tqdm=False)
        assert output.prompt == "Hello"
        kept = []
        while llm.engine.has_unfinished_requests():
            kept += llm.engine.step()
        assert [(output.request_id, output.finished) for output in kept][-1] == ("0", True)


def test_generate_from_several_threads_is_served_one_after_the_other():
    with LLM("tiny", num_gpu_blocks_override=64, max_model_len=200) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        outputs = {}

        def call(text):
            outputs[text] = llm.generate(text, params, use_tqdm=False)[0]

        threads = [threading.Thread(target=call, args=(text,)) for text in ("a", "b", "c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {text: output.prompt for text, output in outputs.items()} == {"a": "a", "b": "b", "c": "c"}


@pytest.mark.parametrize("prompts", [None, 5, b"abc"])
def test_prompts_of_another_kind_are_refused(prompts):
    with LLM("tiny", num_gpu_blocks_override=64, max_model_len=200) as llm:
        with pytest.raises(RequestError, match="must be a text"):
            llm.generate(prompts)
        with pytest.raises(RequestError, match="a chat is a list"):
            llm.chat({"role": "user", "content": "x"})


def test_numpy_ids_are_ids():
    import numpy as np

    with LLM("tiny", num_gpu_blocks_override=64, max_model_len=200) as llm:
        params = SamplingParams(temperature=np.float32(0), max_tokens=np.int64(2), top_k=np.int64(3))
        [one] = llm.generate(np.array([1, 2, 3]), params, use_tqdm=False)
        assert one.prompt_token_ids == [1, 2, 3]


def test_generate_raises_when_its_request_is_aborted_from_elsewhere():
    with LLM("tiny") as llm:
        llm.engine.events.subscribe(lambda record: record.step == 3 and llm.engine.abort("llm-0"))
        with pytest.raises(RequestError, match="request 'llm-0' was aborted while this call waited for it"):
            llm.generate(["a", "b"], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()
