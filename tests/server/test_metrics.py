"""Metrics: every figure is that of the engine's own books, whatever happens to the requests."""

import itertools
import random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from refimpl import BeamSearchParams, Engine, EngineArgs, SamplingParams
from refimpl.server.histogram import Histogram
from refimpl.server.metric_names import METRICS, REASONS, lengths_up_to
from refimpl.server.metrics import ServerMetrics


class Clock:
    """Goes on when it is told to, by sixty-fourths of a second, so that sums are exact."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


RUNS = {
    "roomy": {},
    "preempted": {"num_gpu_blocks_override": 14},
    "swapped": {"num_gpu_blocks_override": 14, "swap_space": 0.01, "preemption_mode": "swap"},
    "planned ahead": {"num_gpu_blocks_override": 14, "async_scheduling": True},
    "drafted": {
        "num_gpu_blocks_override": 20,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    },
    "without chunks": {"enable_prefix_caching": False, "max_num_seqs": 3},
}


class Run:
    """A random run on the tiny model, with metrics, that keeps every request."""

    def __init__(self, seed=0, **options):
        self.clock, self.rng = Clock(), random.Random(seed)
        args = {"model": "tiny", "dtype": "float32", "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 32}
        self.engine = Engine(EngineArgs(**(args | {"num_gpu_blocks_override": 64} | options)), self.clock)
        self.metrics = ServerMetrics("tiny", vllm_names=True)
        self.metrics.watch(self.engine)
        self.requests, self.records = {}, []
        self.engine.events.subscribe(self.records.append)

    def add(self, number):
        rng = self.rng
        prompt = [5, 6, 7, 8] * rng.randrange(0, 3) + [rng.randrange(3, 200) for _ in range(rng.randrange(1, 12))]
        params = SamplingParams(n=rng.choice((1, 1, 2)), max_tokens=rng.randrange(1, 14), seed=number, stop=["q"])
        self.engine.add_request(f"r{number}", prompt, params)
        [self.requests[f"r{number}"]] = self.engine.known_requests(f"r{number}")

    def step(self):
        self.clock.now += self.rng.randrange(1, 40) / 64
        self.engine.step()

    def whole(self, count=22):
        """Requests come now and then, and some are aborted."""
        for number in range(count):
            self.add(number)
            for _ in range(self.rng.randrange(0, 4)):
                self.step()
            if self.rng.random() < 0.15:
                self.engine.abort(self.rng.choice(list(self.requests)))
        while self.engine.has_unfinished_requests():
            self.step()
        return self

    def value(self, name, prefix="refimpl:", **labels):
        samples = itertools.chain(*(family.samples for family in self.metrics.registry.collect()))
        wanted = {"model_name": "tiny", "engine": "0"} | labels
        [found] = [sample.value for sample in samples if sample.name == prefix + name and sample.labels == wanted]
        return found

    def histogram(self, name):
        return self.value(f"{name}_count"), self.value(f"{name}_sum")


@pytest.fixture(params=RUNS, scope="module")
def run(request):
    run = Run(**RUNS[request.param]).whole()
    run.name = request.param
    run.engine.close()
    return run


def gaps_of(request):
    return [b - a for sequence in request.sequences for a, b in itertools.pairwise(sequence.token_times)]


def told(values):
    values = [value for value in values if value is not None]
    return len(values), sum(values)


def test_every_figure_is_that_of_the_books(run):
    requests = list(run.requests.values())
    metrics = [request.metrics for request in requests]
    begun = [one for one in metrics if one.first_token_time is not None]
    gaps = [gap for request in requests for gap in gaps_of(request)]
    assert run.value("generation_tokens_total") == sum(len(s.token_times) for r in requests for s in r.sequences)
    assert run.value("prompt_tokens_total") == sum(one.num_prompt_tokens for one in begun)
    cached = sum(one.num_cached_tokens for one in begun)
    assert run.value("prompt_tokens_cached_total") == cached
    assert run.value("prompt_tokens_by_source_total", source="local_cache_hit") == cached
    computed = run.value("prompt_tokens_by_source_total", source="local_compute")
    assert computed == run.value("prompt_tokens_total") - cached
    assert run.histogram("time_to_first_token_seconds") == told(one.time_to_first_token for one in metrics)
    assert run.histogram("inter_token_latency_seconds") == told(gaps)
    assert run.histogram("time_per_output_token_seconds") == told(gaps)
    assert run.value("num_preemptions_total") == sum(one.num_preemptions for one in metrics)
    assert run.value("spec_decode_num_draft_tokens_total") == sum(one.num_drafts for one in metrics)
    accepted = sum(one.num_accepted for one in metrics)
    assert run.value("spec_decode_num_accepted_tokens_total") == accepted
    stats = run.engine.prefix_cache_stats
    for name, figure in (("queries", stats.queries), ("hits", stats.hits), ("evictions", stats.evictions)):
        assert run.value(f"prefix_cache_{name}_total") == figure


def test_requests_are_counted_by_why_they_ended_and_timed_if_they_ended_by_themselves(run):
    ended = {name: [] for name in REASONS}
    for request in run.requests.values():
        found = {sequence.finish_reason for sequence in request.sequences}
        ended[next(name for name in ("error", "abort", "length", "stop") if name in found)].append(request)
    for reason, requests in ended.items():
        assert run.value("request_success_total", finished_reason=reason) == len(requests)
    assert ended["abort"]
    assert ended["length"]
    whole = ended["stop"] + ended["length"]
    last = {id(request): max(times[-1] for times in request.metrics.token_times if times) for request in whole}
    expected = {
        "e2e_request_latency_seconds": [request.metrics.e2e_latency for request in whole],
        "request_queue_time_seconds": [request.metrics.queued_time for request in whole],
        "request_prefill_time_seconds": [
            request.metrics.first_token_time - request.metrics.first_scheduled_time for request in whole
        ],
        "request_decode_time_seconds": [last[id(request)] - request.metrics.first_token_time for request in whole],
        "request_inference_time_seconds": [last[id(request)] - request.metrics.first_scheduled_time for request in whole],
        "request_prompt_tokens": [request.metrics.num_prompt_tokens for request in whole],
        "request_generation_tokens": [request.metrics.num_generation_tokens for request in whole],
        "request_params_n": [request.params.n for request in whole],
        "request_params_max_tokens": [request.max_tokens for request in whole],
    }
    for name, values in expected.items():
        assert run.histogram(name) == told(values), name
    count, total = run.histogram("request_time_per_output_token_seconds")
    means = told(request.metrics.mean_time_per_output_token for request in whole)
    assert (count, total) == (means[0], pytest.approx(means[1]))


def test_steps_and_blocks_that_move_are_those_of_the_log(run):
    steps = [sum(record.num_new_tokens) for record in run.records if record.sequence_ids]
    assert run.histogram("iteration_tokens_total") == told(steps)
    for direction, transfer in (("out", "GPU_to_CPU"), ("in", "CPU_to_GPU")):
        moved = sum(len(getattr(record, f"swapped_{direction}")) for record in run.records)
        assert run.value("swapped_blocks_total", direction=direction) == moved
        assert (
            run.value("kv_offload_total_bytes_total", transfer_type=transfer)
            == moved * (run.engine.events.header.config["block_bytes"])
        )
    assert run.value("num_requests_running") == run.value("num_requests_waiting") == 0
    assert run.value("num_requests_swapped") == run.value("kv_cache_usage_perc") == run.value("cpu_cache_usage_perc") == 0


def test_each_run_does_what_it_is_for(run):
    needed = {"preempted": "num_preemptions_total", "planned ahead": "num_preemptions_total"}
    if run.name in needed:
        assert run.value(needed[run.name]) > 3
        assert run.value("prefix_cache_hits_total") > 0
    if run.name == "swapped":
        assert run.value("swapped_blocks_total", direction="in") > 3
    if run.name == "drafted":
        assert run.value("spec_decode_num_accepted_tokens_total") > 0


def test_accepted_drafts_are_counted_by_their_place(run):
    checks = [(len(d), n) for r in run.records if r.drafts for d, n in zip(r.drafts, r.num_accepted, strict=True) if d]
    assert run.value("spec_decode_num_drafts_total") == len(checks)
    if run.name == "drafted":
        by_place = [run.value("spec_decode_num_accepted_tokens_per_pos_total", position=str(at)) for at in range(3)]
        assert by_place == [sum(n > at for _, n in checks) for at in range(3)]
        assert sum(by_place) == run.value("spec_decode_num_accepted_tokens_total")


def test_gauges_are_read_from_the_engine_as_it_is():
    run = Run(num_gpu_blocks_override=14)
    for number in range(12):
        run.add(number)
    for _ in range(3):
        run.step()
    scheduler = run.engine.scheduler
    assert run.value("num_requests_running") == len(scheduler.running) > 0
    assert run.value("num_requests_waiting") == len(scheduler.waiting) > 0
    assert run.value("kv_cache_usage_perc") == 1 - scheduler.kv.num_free_blocks / 14 > 0
    assert run.value("engine_up") == 1
    run.engine.close()
    assert run.value("engine_up") == 0


def test_a_batch_that_stays_the_same_is_counted_as_one_that_is_looked_through():
    """Four sequences decode for long: their steps go the short way, and the books still agree."""
    run = Run()
    for number in range(4):
        run.engine.add_request(str(number), [3 + number] * 5, SamplingParams(max_tokens=40, ignore_eos=True))
        [run.requests[str(number)]] = run.engine.known_requests(str(number))
    short = 0
    while run.engine.has_unfinished_requests():
        run.step()
        short += run.metrics._engines["0"]._steady is not None
    assert short > 30
    assert run.histogram("inter_token_latency_seconds") == told(g for r in run.requests.values() for g in gaps_of(r))
    assert run.value("generation_tokens_total") == 160
    run.engine.close()


def test_a_beam_search_counts_the_tokens_of_its_hypotheses():
    run = Run()
    run.engine.add_request("beams", [5, 6, 7, 8, 9], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
    outputs = []
    while run.engine.has_unfinished_requests():
        run.clock.now += 0.5
        outputs += run.engine.step()
    assert run.value("generation_tokens_total") == sum(len(one.token_ids) for one in outputs[-1].outputs)
    assert run.histogram("time_to_first_token_seconds") == (1, outputs[-1].metrics.time_to_first_token)
    assert run.histogram("request_params_n") == (1, 3)
    counts = run.metrics._engines["0"]
    assert not counts._requests
    assert not counts._searches
    run.engine.close()


def test_nothing_is_kept_of_requests_that_ended(run):
    counts = run.metrics._engines["0"]
    assert not counts._requests
    assert not counts._swapped
    assert not counts._last_token


def test_thousands_aborted_at_once_are_all_counted():
    run = Run()
    for number in range(1500):
        run.engine.add_request(str(number), [5, 6], SamplingParams(max_tokens=4))
    run.engine.abort([str(number) for number in range(1500)])
    assert run.value("request_success_total", finished_reason="abort") == 1500
    run.engine.close()


def test_an_engine_without_a_log_is_counted_too():
    run = Run(event_log_size=0).whole(6)
    assert run.value("generation_tokens_total") == sum(
        len(s.token_times) for r in run.requests.values() for s in r.sequences
    )
    run.metrics.close()
    run.engine.close()


def test_a_histogram_counts_a_value_at_its_bound_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    histogram.observe(0.25, 2)
    assert histogram.cumulative() == ([4, 6, 7], 8.5)


def test_lengths_have_buckets_up_to_the_longest_sequence():
    assert lengths_up_to(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
    assert lengths_up_to(1) == (1,)


def test_the_text_is_prometheus_format_under_both_prefixes():
    run = Run().whole(3)
    text = run.metrics.render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in METRICS:
        assert families[f"refimpl:{metric.name}"].type == metric.kind
        assert (f"vllm:{metric.name}" in families) == metric.in_vllm
    assert run.metrics.content_type.startswith("text/plain")
    run.engine.close()
