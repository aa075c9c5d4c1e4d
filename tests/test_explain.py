"""The story of a request, as a person would ask for it."""

from refimpl import Engine, EngineArgs, SamplingParams


def test_a_request_that_waited_was_chunked_preempted_and_resumed_is_told_in_order():
    engine = Engine(
        EngineArgs(
            model="tiny",
            dtype="float64",
            block_size=4,
            num_gpu_blocks_override=14,
            max_num_batched_tokens=16,
            enable_prefix_caching=False,
        )
    )
    greedy = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    engine.add_request("first", [5] * 24, greedy)
    engine.add_request("second", [6] * 26, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        assert engine.audit() == []
    told = engine.explain("second").splitlines()
    chapters = [
        "arrives with 26 prompt tokens, wants at most 12 more; 1 waiting before it",
        "waits: ",
        "is admitted to slot 1",
        "is split by the budget",
        "is preempted (recompute) and waits with its",
        "is admitted again, to slot",
        "ends after 12 output tokens: length",
        "now: finished with reason length: 12 output tokens, the first",
    ]
    places = [next((i for i, line in enumerate(told) if chapter in line), None) for chapter in chapters]
    assert None not in places, "\n".join(told)
    assert places == sorted(places), "\n".join(told)
    engine.close()
