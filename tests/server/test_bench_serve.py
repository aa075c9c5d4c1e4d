"""bench serve: counts and errors against a scripted server, percentiles against known times, workloads and arrivals."""

import asyncio
import itertools
import json
import math
import sys
import time
import urllib.request
from collections import Counter

import pytest
from asgi_support import serving
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import Scripted, words
from typer.testing import CliRunner

from refimpl.bench import report, serve_process
from refimpl.bench.arrivals import arrival_times
from refimpl.bench.commands import bench
from refimpl.bench.http_stream import Chunks, HttpClient, HttpError
from refimpl.bench.measured import SEED
from refimpl.bench.open_loop import Ask, Outcome, drive
from refimpl.bench.openai_stream import Answer, OpenAIStream
from refimpl.bench.request_times import RequestTimes
from refimpl.bench.serve import Pattern, Target, checks, figures, generator_is_late, run
from refimpl.bench.serve_plots import charts, write_plots
from refimpl.bench.serve_process import flags_of, served
from refimpl.bench.serve_workload import LOWEST_ID, Workload
from refimpl.config import EngineArgs
from refimpl.errors import ConfigError, RefimplError

FEW = Workload("8/5", num_prompts=12)
PLAIN = Pattern(warm_up=0)
ROWS_AND_WARM_UPS = ((0, 2), (2, 6), (8, 2), (10, 6))
"""Where the requests of two rows of six begin, each behind a warm-up of two."""


def measured(script, workload=FEW, pattern=PLAIN, **target):
    server = Scripted(script)
    with serving(server.app) as url:
        result = run(Target(url, **target), workload, pattern)
    [row] = result.results.values()
    return row, server, result


# ---------------------------------------------------------------------- counts


def test_tokens_are_the_servers_own_count_and_pieces_make_the_gaps():
    row, server, result = measured(lambda number, body: words(number % 3 + 1, completion=5))
    assert (row["requests"], row["answered"], row["errors"]) == (12, 12, {})
    assert (row["prompt_tokens"], row["output_tokens"], row["tokens_counted_by_server"]) == (84, 60, True)
    assert result.setting["model"] == "scripted"
    assert result.setting["tokens_produced"] == 60
    assert [check.name for check in result.checks] == ["errors", "ttft_p50", "itl_p50"]
    body = server.bodies[0]
    assert (len(body["prompt"]), body["max_tokens"], body["stream"], body["temperature"]) == (8, 5, True, 0.0)
    assert body["stream_options"] == {"include_usage": True}
    assert server.keys == [None] * 12


def test_without_a_usage_pieces_are_counted_and_that_is_said():
    row, _, _ = measured(lambda number, body: [("text", "a"), ("text", "b"), ("finish", "stop"), ("done",)])
    assert (row["output_tokens"], row["tokens_counted_by_server"]) == (24, False)


def test_chats_are_asked_in_words_and_their_role_is_no_token():
    workload = Workload("8/5", num_prompts=3, chat=True)
    row, server, _ = measured(lambda number, body: [("role",), *words(4)], workload, api_key="secret")
    assert server.paths == ["/v1/chat/completions"] * 3
    assert [len(body["messages"][0]["content"].split()) for body in server.bodies] == [8] * 3
    assert server.keys == ["Bearer secret"] * 3
    assert row["answered"] == 3
    assert row["output_tokens"] == 12


def test_tokens_without_a_text_count_up_to_the_end():
    row, _, _ = measured(lambda number, body: [("finish", "length"), ("usage", 3, 5), ("done",)])
    assert row["output_tokens"] == 60
    assert row["ttft"]["p50"] > 0
    assert row["itl"] == {}


def test_errors_are_told_by_their_class_and_the_others_are_measured():
    def script(number, body):
        return {
            0: [("status", 503, "come again")],
            1: [("status", 400, "no such thing")],
            2: [("text", "a"), ("cut",)],
            3: [("text", "a"), ("raw", b"data: {not json\n\n")],
            4: [("text", "a"), ("raw", b'data: {"error": {"message": "the step failed"}}\n\n')],
            5: [("text", "a")],
        }.get(number, list(words(5)))

    row, _, result = measured(script, pattern=Pattern(warm_up=0, max_concurrency=1))
    assert row["errors"] == {"http 503": 1, "http 400": 1, "disconnected": 2, "protocol": 1, "stream": 1}
    assert "come again" in row["error_examples"]["http 503"][0]
    assert "the step failed" in row["error_examples"]["stream"][0]
    assert (row["requests"], row["answered"], row["output_tokens"]) == (12, 6, 30)
    assert row["goodput"]["share"] <= 0.5
    assert [check.ok for check in result.checks if check.name == "errors"] == [False]


def test_a_server_that_says_nothing_for_too_long_is_a_timeout_and_one_that_is_not_there_a_connect():
    row, _, _ = measured(lambda number, body: [("text", "a"), ("wait", 30)], Workload("8/5", 2), timeout=0.2)
    assert row["errors"] == {"timeout": 2}

    async def ask():
        async with OpenAIStream("http://127.0.0.1:9", "none") as stream:
            return await stream.ask([1], 1, 0.0)

    assert asyncio.run(ask()).error == "connect"
    with pytest.raises(RefimplError, match="is the server up"):
        run(Target("http://127.0.0.1:9"), FEW, PLAIN)


def test_a_warm_up_that_nobody_answers_ends_the_run_with_the_reason():
    server = Scripted(lambda number, body: [("status", 404, "no model of that name")])
    with serving(server.app) as url, pytest.raises(RefimplError, match="no model of that name"):
        run(Target(url), FEW, Pattern(warm_up=2))
    assert len(server.bodies) == 2


def test_a_warm_up_is_short_and_not_counted():
    row, server, _ = measured(lambda number, body: words(2), Workload("8/50", 5), Pattern(warm_up=3))
    assert row["requests"] == 5
    assert Counter(body["max_tokens"] for body in server.bodies) == {8: 3, 50: 5}


@pytest.mark.parametrize("name", ["8/2", "prefix:2*8+4/2"])
def test_no_row_finds_prefixes_of_another_or_of_a_warm_up_in_a_cache(name):
    server = Scripted(lambda number, body: words(2))
    with serving(server.app) as url:
        run(Target(url), Workload(name, 6), Pattern(rates=(1000, math.inf), warm_up=2))
    rows = [{tuple(body["prompt"][:8]) for body in server.bodies[at : at + count]} for at, count in ROWS_AND_WARM_UPS]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(rows, 2))
    lengths = [sorted(len(body["prompt"]) for body in server.bodies[at : at + 6]) for at in (2, 10)]
    assert lengths[0] == lengths[1]


def test_no_more_are_under_way_than_allowed():
    row, server, _ = measured(
        lambda number, body: [("text", "a"), ("wait", 0.01), *words(1)], pattern=Pattern(warm_up=0, max_concurrency=3)
    )
    assert server.most_in_flight == row["most_in_flight"] == 3
    row, server, _ = measured(lambda number, body: [("text", "a"), ("wait", 0.05), *words(1)])
    assert row["most_in_flight"] == 12


def test_events_that_are_cut_anywhere_are_put_together():
    def script(number, body):
        whole = b'data: {"choices":[{"text":"a","finish_reason":null}]}\r\n\r\n'
        whole += b'data: {"choices":[{"text":"b","finish_reason":"stop"}]}'
        place = 5 + 9 * number
        return [("raw", whole[:place]), ("wait", 0.002), ("raw", whole[place:] + b"\n\n"), ("raw", b": note\n\n"), ("done",)]

    row, _, _ = measured(script)
    assert row["errors"] == {}
    assert row["output_tokens"] == 24


def test_a_url_with_a_password_is_refused_and_one_with_v1_is_taken():
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        run(Target("http://me:secret@host"), FEW, PLAIN)
    with pytest.raises(ConfigError, match="url is 'host:80'"):
        run(Target("host:80"), FEW, PLAIN)
    assert OpenAIStream("http://a/v1/").base == OpenAIStream("http://a").base == "http://a/v1"


# ---------------------------------------------------------------------- figures


def answered(sent, *times, tokens=None, ended=None, error=None):
    answer = Answer(sent, sent, RequestTimes(sent), error=error)
    for now in times:
        OpenAIStream._piece(now, answer)
    answer.times.tokens = tokens or len(times)
    answer.ended = ended or (times[-1] if times else sent)
    return answer


def test_figures_are_those_of_known_times():
    outcome = Outcome(
        [answered(0.0, 0.1, 0.2, 0.5), answered(1.0, 1.3, 1.4, tokens=5), answered(2.0, error="http 500")], 4.0
    )
    row = figures(outcome, (0.2, 0.15))
    assert row["ttft"] == {"p50": pytest.approx(0.3), "p90": pytest.approx(0.3), "p99": pytest.approx(0.3)} | {
        "mean": pytest.approx(0.2), "max": pytest.approx(0.3)
    }  # fmt: skip
    assert row["itl"]["p50"] == pytest.approx(0.1)
    assert row["itl"]["mean"] == pytest.approx((0.1 + 0.3 + 0.1) / 3)
    assert row["tpot"]["max"] == pytest.approx(0.4 / 2)
    assert row["tpot"]["mean"] == pytest.approx((0.4 / 2 + 0.1 / 4) / 2)
    assert row["e2e"]["max"] == pytest.approx(0.5)
    assert row["output_tokens"] == 8
    assert row["output_tokens_per_second"] == 2.0
    assert row["requests_per_second"] == 0.5
    assert row["goodput"]["share"] == 0, "the first took too long a token, the second too long to begin"
    assert figures(outcome, (0.2, 0.25))["goodput"]["share"] == pytest.approx(1 / 3), "of all that were sent"
    assert figures(outcome, (0.5, 0.25))["goodput"]["requests_per_second"] == 0.5


def test_a_late_generator_is_told_of():
    outcome = Outcome([answered(0.0, 0.1, 0.11)], 1.0, sent_late=[0.001], woken_late=[0.0001])
    row = figures(outcome, (1, 1))
    assert generator_is_late(row) is None
    late = figures(Outcome(outcome.answers, 1.0, sent_late=[0.05], woken_late=[0.0]), (1, 1))
    assert "first token" in generator_is_late(late)
    slow = figures(Outcome(outcome.answers, 1.0, sent_late=[0.0], woken_late=[0.005]), (1, 1))
    assert "gap between tokens" in generator_is_late(slow)


def test_checks_are_named_by_their_row_where_there_are_several():
    row = figures(Outcome([answered(0.0, 0.1, 0.2)], 1.0), (0.2, 0.05))
    assert [(one.name, one.ok) for one in checks({"poisson-10": row}, (0.2, 0.05))] == [
        ("errors", True), ("ttft_p50", True), ("itl_p50", False)
    ]  # fmt: skip
    assert [one.name for one in checks({"poisson-10": row, "all-at-once": row}, (1, 1))] == [
        "poisson10_errors", "poisson10_ttft_p50", "poisson10_itl_p50",
        "allatonce_errors", "allatonce_ttft_p50", "allatonce_itl_p50",
    ]  # fmt: skip


def test_requests_are_sent_in_order_and_never_before_their_time():
    now, sent = [0.0], []

    async def send(ask, due):
        sent.append((ask.output, due))
        answer = answered(due + 0.25, due + 1)
        answer.due = due
        return answer

    def clock():
        now[0] += 0.001
        return now[0]

    asks = [Ask(at, "x", number) for number, at in enumerate((0.0, 0.002, 0.003, 0.02))]
    outcome = asyncio.run(drive(asks, send, clock))
    assert [number for number, _ in sent] == [0, 1, 2, 3]
    start = sent[0][1]
    assert [due - start for _, due in sent] == pytest.approx([0.0, 0.002, 0.003, 0.02])
    assert outcome.sent_late == pytest.approx([0.25] * 4)
    assert outcome.seconds == pytest.approx(1.02)


# ---------------------------------------------------------------------- workloads


def test_arrivals_by_count_are_those_by_seconds():
    times = arrival_times(10, 20, SEED)
    workload = Workload("1/1", num_prompts=len(times), seed=SEED)
    assert [ask.at for ask in workload.asks(10)] == pytest.approx(times)
    assert {ask.at for ask in workload.asks(math.inf)} == {0.0}


@pytest.mark.parametrize("name", ["chat", "16/4", "8-32/2*1,4*1", "prefix:3*20+4-6/2", "conv", "mixed"])
def test_a_seed_means_the_same_requests(name):
    workload = Workload(name, num_prompts=20, seed=3)
    asks = workload.asks(5.0)
    assert asks == Workload(name, num_prompts=20, seed=3).asks(5.0)
    assert asks != Workload(name, num_prompts=20, seed=4).asks(5.0)
    assert len(asks) == 20
    assert all(max(ask.prompt) < 1000 for ask in asks)
    if name != "mixed":
        assert all(min(ask.prompt) >= LOWEST_ID for ask in asks)


def test_groups_share_their_prefix_and_nothing_else():
    asks = Workload("prefix:3*20+4-6/2", num_prompts=30, seed=1).asks(math.inf)
    groups = Counter(tuple(ask.prompt[:20]) for ask in asks)
    assert sorted(groups.values()) == [10, 10, 10]
    assert len({tuple(ask.prompt[20:]) for ask in asks}) == 30
    assert all(4 <= len(ask.prompt) - 20 <= 6 for ask in asks)


def test_a_trace_keeps_its_times_or_takes_a_rate(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,2\n1.5,6,3\n4,7,4\n")
    asks = Workload(str(trace), num_prompts=10).asks(None)
    assert [(ask.at, len(ask.prompt), ask.output) for ask in asks] == [(0.0, 5, 2), (1.5, 6, 3), (4.0, 7, 4)]
    assert [ask.at for ask in Workload(str(trace), num_prompts=2).asks(math.inf)] == [0.0, 0.0]
    conv = Workload("conv", num_prompts=5).asks(None)
    assert conv[-1].at > 0


def test_prompts_of_a_file_come_in_turn(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n{"prompt": "two", "max_tokens": 9}\n{"prompt_token_ids": [1, 2]}\n')
    asks = Workload(str(file), num_prompts=4, max_tokens=6).asks(math.inf)
    assert [(ask.prompt, ask.output) for ask in asks] == [("one", 6), ("two", 9), ([1, 2], 6), ("one", 6)]
    with pytest.raises(ConfigError, match="leave out --chat"):
        Workload(str(file), num_prompts=4, chat=True).asks(math.inf)


@pytest.mark.parametrize(
    ("wrong", "rate", "says"),
    [
        ({"name": "prefix:3x20"}, 1, "prefix:GROUPS"),
        ({"name": "long"}, 1, "PROMPT/OUTPUT"),
        ({"num_prompts": 0}, 1, "num_prompts is 0"),
        ({"vocab_size": 50}, 1, "vocab_size is 50"),
        ({"burstiness": 0}, 1, "burstiness is 0"),
        ({}, -1, "request_rate is -1"),
        ({}, None, "no times of its own"),
    ],
)
def test_what_cannot_be_asked_is_refused(wrong, rate, says):
    with pytest.raises(ConfigError, match=says):
        Workload(**wrong).asks(rate)


# ---------------------------------------------------------------------- the command, its table and its plots


def test_the_command_measures_a_url_and_keeps_table_and_plots(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    server = Scripted(lambda number, body: words(3))
    with serving(server.app) as url:
        options = ["serve", "--url", url, "--workload", "8/3", "--num-prompts", "6", "--request-rate", "200,inf", "--json"]
        more = ["--goodput", "ttft:60000,tpot:60000", "--plot", str(tmp_path / "plot.html"), "--save", str(tmp_path)]
        done = CliRunner().invoke(bench, [*options, *more, "--served-model-name", "mine", "--extra-body", '{"top_k": 3}'])
    assert done.exit_code == 0, done.output
    assert set(server.keys) == {"Bearer from-the-environment"}
    assert {(body["model"], body["top_k"], body["ignore_eos"]) for body in server.bodies} == {("mine", 3, True)}
    [file] = tmp_path.glob("serve-*.json")
    result = json.loads(file.read_text())
    assert list(result["results"]) == ["poisson-200", "all-at-once"]
    assert "from-the-environment" not in file.read_text()
    table = report.TABLES["serve"](result)
    assert table.count("| poisson-200 |") == table.count("| all-at-once |") == 1
    assert "errors: none" in table
    page = (tmp_path / "plot.html").read_text()
    assert "Time to the first token" in page
    assert 'src="http' not in page


def test_plots_are_of_shares_and_of_requests_under_way(tmp_path):
    outcome = Outcome([answered(0.0, 0.1, 0.3), answered(0.05, 0.2)], 1.0)
    made = {chart.title: chart for chart in charts({"row": outcome})}
    assert made["Time to the first token"].lines["row"][-1] == (pytest.approx(150), 1.0)
    assert made["Time between tokens"].lines["row"] == [(pytest.approx(200), 1.0)]
    assert [number for _, number in made["Requests under way"].lines["row"]] == [1, 2, 1, 0]
    with pytest.raises(RefimplError, match="nothing to plot"):
        write_plots(tmp_path / "none.html", {})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--url", "http://a", "--block-size", "32"], "--block-size 32 is for a server that is started here"),
        (["--url", "http://a", "--request-rate", "fast"], "request_rate is 'fast'"),
        (["--url", "http://a", "--request-rate", "0"], "above 0"),
        (["--url", "http://a", "--goodput", "ttft:1"], "give both limits"),
        (["--url", "http://a", "--extra-body", "[1]"], "must be a JSON object"),
        (["--workload", "nothing"], "PROMPT/OUTPUT"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_asked(options, says):
    done = CliRunner().invoke(bench, ["serve", *options])
    assert isinstance(done.exception, ConfigError)
    assert says in str(done.exception)


# ---------------------------------------------------------------------- a server of its own

STUB = """
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *args): pass
print("stub", sys.argv[1:], flush=True)
if "--fail" in sys.argv: sys.exit("no such model")
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_engine_options_become_flags_and_defaults_are_left_out():
    args = EngineArgs(speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    options = {"model": "tiny", "block_size": 16, "enable_prefix_caching": False, "enforce_eager": True, "max_num_seqs": 8}
    flags = flags_of(options | {"speculative_config": args.speculative_config, "max_model_len": None})
    assert flags[:6] == ["--model", "tiny", "--no-enable-prefix-caching", "--enforce-eager", "--max-num-seqs", "8"]
    assert json.loads(flags[7])["num_speculative_tokens"] == 2


def test_a_server_is_started_on_a_free_port_and_ended(monkeypatch):
    started = []
    popen = serve_process.subprocess.Popen
    monkeypatch.setattr(serve_process.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    with served(["--model", "tiny"], (sys.executable, "-c", STUB)) as url:
        assert urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
        assert started[0].poll() is None
    assert started[0].poll() is not None


def test_a_server_that_does_not_start_is_told_with_what_it_said():
    with (
        pytest.raises(RefimplError, match=r"ended with code 1(.|\n)*no such model"),
        served(["--fail"], (sys.executable, "-c", STUB)),
    ):
        pass


# ---------------------------------------------------------------------- HTTP


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(1, 7), min_size=1, max_size=200))
def test_chunks_are_put_together_however_they_are_cut(contents, cuts):
    coded = b"".join(b"%x;note=1\r\n%b\r\n" % (len(one), one) for one in contents) + b"0\r\n\r\n"
    chunks, found, at = Chunks(), [], 0
    for cut in [*cuts, len(coded)]:
        found.append(chunks.feed(coded[at : at + cut]))
        at += cut
    assert b"".join(found) == b"".join(contents)
    assert chunks.done


def answers_with(*replies):
    """A server that answers each connection's requests with given bytes, and closes it where they are None."""

    async def serve(test):
        left, connections = list(replies), []

        async def client(reader, writer):
            connections.append(writer)
            while left and (line := await reader.readline()):
                while await reader.readline() != b"\r\n":
                    pass
                assert line.endswith(b"HTTP/1.1\r\n")
                if (reply := left.pop(0)) is None:
                    break
                writer.write(reply)
            writer.close()

        server = await asyncio.start_server(client, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        http = HttpClient(url, {"X-Test": "1"}, 5.0, time.perf_counter)
        try:
            return await test(http), len(connections)
        finally:
            http.close()
            server.close()
            await server.wait_closed()

    return lambda test: asyncio.run(serve(test))


async def get(http):
    return await http.whole("GET", "/")


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def test_a_connection_is_used_again_and_a_new_one_made_where_it_was_closed():
    async def test(http):
        return [await get(http) for _ in range(4)]

    assert answers_with(OK, OK, None, OK, OK)(test) == ([(200, b"ok")] * 4, 2)
    last = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    assert answers_with(last, last, last, last)(test) == ([(200, b"ok")] * 4, 4)


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (None, "disconnected"),
        (b"HTTP/1.1 200 OK\r\n", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "protocol"),
        (b"SSH-2.0-none\r\n\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "protocol"),
    ],
)
def test_a_response_that_is_none_is_an_error_of_its_class(reply, kind):
    async def test(http):
        with pytest.raises(HttpError) as raised:
            await get(http)
        return raised.value.kind

    assert answers_with(reply)(test)[0] == kind


def test_a_body_without_a_length_ends_with_its_connection():
    async def test(http):
        return await get(http)

    assert answers_with(b"HTTP/1.0 404 Not Found\r\n\r\ngone")(test)[0] == (404, b"gone")
