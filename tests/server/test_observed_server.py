"""The whole server as ``refimpl serve`` puts it together: metrics, page and replicas, under the load generator."""

import json
import threading

import httpx
import pytest
from typer.testing import CliRunner

from refimpl.bench.commands import bench
from refimpl.config import EngineArgs
from refimpl.server import serving
from refimpl.server.limits import Limits
from refimpl.server.runner import Runner
from refimpl.server.serve_options import ServeOptions
from refimpl.server.serving import Serving

OPTIONS = {"dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 128, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def url():
    """Two replicas behind a key."""
    ready, runners, lines = threading.Event(), [], []

    class Kept(Runner):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            runners.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "Runner", Kept)
        patch.setattr(serving, "_say", lambda line: (lines.append(line), ready.set()))
        patch.setattr(serving.gc, "freeze", lambda: None)
        options = ServeOptions(port=0, shutdown_timeout=5, api_key=["right"], data_parallel_size=2)
        whole = Serving(options, Limits(), ("tiny",))
        thread = threading.Thread(target=whole.run, args=(EngineArgs(model="tiny", **OPTIONS),))
        thread.start()
        assert ready.wait(60)
        url = lines[0].split()[-1].removesuffix("/v1")
        yield url
        with httpx.stream("GET", f"{url}/ui/frames", trust_env=False, timeout=30) as page:  # an open page holds up nobody
            events = page.iter_lines()
            next(events)
            runners[0].stop()
            for _ in events:
                pass
        thread.join(60)
        assert not thread.is_alive()


def test_the_load_generator_and_the_metrics_agree(url, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    options = ["serve", "--url", url, "--workload", "prefix:4*32+4-12/6", "--num-prompts", "24", "--vocab-size", "200"]
    done = CliRunner().invoke(bench, [*options, "--goodput", "ttft:60000,tpot:60000", "--warm-up", "0", "--json"])
    assert done.exit_code == 0, done.output
    [row] = json.loads(done.stdout)["results"].values()
    assert (row["answered"], row["output_tokens"], row["errors"]) == (24, 144, {})
    assert row["tokens_counted_by_server"]
    text = httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer right"}, trust_env=False).text
    values = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    for prefix in ("refimpl", "vllm"):
        of = {name: float(value) for name, value in values if name.startswith(f"{prefix}:")}
        tokens = [value for name, value in of.items() if name.startswith(f"{prefix}:generation_tokens_total")]
        assert len(tokens) == 2, "one sample a replica"
        assert sum(tokens) == 144
        prompts = sum(value for name, value in of.items() if name.startswith(f"{prefix}:prompt_tokens_total"))
        assert prompts == row["prompt_tokens"]
        assert sum(value for name, value in of.items() if name.startswith(f"{prefix}:prefix_cache_hits_total")) > 0


def test_the_key_is_asked_for_everywhere_but_at_the_page(url):
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/v1/models").status_code == 401
        assert client.get("/ui").status_code == 200
        assert client.get("/ui/ui.js").status_code == 200
        assert client.get("/uix").status_code == 401
        with client.stream("GET", "/ui/frames?engine=1") as stream:
            assert not json.loads(next(stream.iter_lines())[6:])["texts"]
        assert client.get("/load", headers={"Authorization": "Bearer right"}).json()["num_running"] == 0
