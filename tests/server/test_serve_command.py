"""``refimpl serve``: its flags and their effect, its file of flags, what it prints, and how it ends."""

import json
import subprocess
import sys

import httpx
import pytest
from serve_process import served

from refimpl import EngineArgs
from refimpl.cli import main
from refimpl.server import serving
from refimpl.server.known_flags import MOST_QUEUED, notes


@pytest.fixture
def told(monkeypatch, capsys, tmp_path):
    """Run ``refimpl serve …`` up to where it would load the model: (Serving, EngineArgs), or the message of its failure."""

    def told(*arguments):
        found = []
        monkeypatch.setattr(serving.Serving, "run", lambda self, args: found.append((self, args)))
        monkeypatch.setattr("refimpl.server.command._log_to_stderr", lambda level: None)
        monkeypatch.setattr(sys, "argv", ["refimpl", "serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        if exit.value.code:
            assert (exit.value.code, captured.out) == (2, "")
            assert captured.err.startswith("refimpl: ")
            return captured.err
        return found[0]

    return told


# ---------------------------------------------------------------------- flags


def test_defaults_are_safe(told):
    server, args = told()
    assert (server.listening.host, server.listening.port) == ("127.0.0.1", 8000)
    assert set(server.rules().hosts) == {"localhost", "127.0.0.1", "::1"}
    assert server.names == ("smollm2",)
    assert args.max_num_queued_reqs == MOST_QUEUED
    assert server.rules().api_keys == ()
    assert server.options.ui


def test_flags_that_stand_in_articles_reach_the_engine(told):
    server, args = told(
        "tiny", "--max-num-batched-tokens", 64, "--max-num-seqs", 4, "--block-size", 8, "--gpu-memory-utilization", 0.5,
        "--enable-prefix-caching", "--quantization", "fp8", "--swap-space", 1, "--max-model-len", 128, "--dtype", "float32",
        "--enforce-eager", "--num-speculative-tokens", 3, "--speculative-model", "[ngram]", "--use-v2-block-manager",
        "--served-model-name", "gpt-4", "--served-model-name", "tiny", "--api-key", "a", "--host", "0.0.0.0", "--no-ui",
    )  # fmt: skip
    assert (args.model, args.max_num_batched_tokens, args.max_num_seqs, args.block_size) == ("tiny", 64, 4, 8)
    assert (args.gpu_memory_utilization, args.enable_prefix_caching, args.quantization) == (0.5, True, "fp8")
    assert (args.swap_space, args.max_model_len, args.dtype, args.enforce_eager) == (1, 128, "float32", True)
    assert (args.speculative_config.method, args.speculative_config.num_speculative_tokens) == ("ngram", 3)
    assert server.names == ("gpt-4", "tiny")
    assert (server.rules().api_keys, server.options.ui, server.rules().hosts) == (("a",), False, ())
    assert told("--model", "tiny", "--no-enable-prefix-caching")[1].enable_prefix_caching is False
    assert told("tiny", "--speculative-model", "org/draft")[1].speculative_config.method == "draft_model"


def test_what_became_of_old_flags_is_said(told):
    args = EngineArgs(model="tiny", speculative_config={"method": "ngram"}, swap_space=2.0)
    said = "\n".join(notes(args, use_v2_block_manager=True))
    for word in ("--use-v2-block-manager changes nothing", "method ngram, up to 5 drafts", "--swap-space 2"):
        assert word in said
    assert "v2" not in "\n".join(notes(EngineArgs(model="tiny"), use_v2_block_manager=False))


def test_keys_may_come_from_the_environment(told, monkeypatch):
    monkeypatch.setenv("REFIMPL_API_KEY", "one two")
    assert told("tiny")[0].rules().api_keys == ("one", "two")
    assert told("tiny", "--api-key", "three")[0].rules().api_keys == ("three",)


def test_limits_are_flags(told):
    server, _ = told("tiny", "--max-n", 3, "--max-body-bytes", 1000, "--request-timeout", 1.5)
    assert (server.limits.max_n, server.limits.max_body_bytes, server.limits.request_timeout) == (3, 1000, 1.5)
    assert "max_n is 0; it must be above 0" in told("tiny", "--max-n", 0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", 'model: tiny\nport: 9\nmax-model-len: 99\nenable_prefix_caching: false\nserved-model-name: [a, b]\n'
         'speculative-config: {method: ngram, num_speculative_tokens: 2}\nswap-space: 0.5\nmax-n: 7\napi-key: null\n'),
        ("a.toml", 'model = "tiny"\nport = 9\nmax-model-len = 99\nenable_prefix_caching = false\n'
         'served-model-name = ["a", "b"]\nspeculative-config = {method = "ngram", num_speculative_tokens = 2}\n'
         "swap-space = 0.5\nmax-n = 7\n"),
        ("a.json", json.dumps({
            "model": "tiny", "port": 9, "max-model-len": 99, "enable_prefix_caching": False, "swap-space": 0.5, "max-n": 7,
            "served-model-name": ["a", "b"], "speculative-config": {"method": "ngram", "num_speculative_tokens": 2}})),
    ],
)  # fmt: skip
def test_a_file_of_flags_is_what_the_command_line_leaves_open(told, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    server, args = told("--config", tmp_path / name, "--port", 10)
    assert (args.model, args.max_model_len, args.enable_prefix_caching, args.swap_space) == ("tiny", 99, False, 0.5)
    assert (args.speculative_config.method, args.speculative_config.num_speculative_tokens) == ("ngram", 2)
    assert (server.listening.port, server.names, server.limits.max_n) == (10, ("a", "b"), 7)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "max-model-lenn: 3", "did you mean max_model_len"),
        ("a.yaml", "port: [1, 2]", "port is a list; it takes one value"),
        ("a.yaml", "port: x", "Invalid value"),
        ("a.yaml", "port: 1.5", "Invalid value"),
        ("a.yaml", "enforce-eager: 1", "must be true or false"),
        ("a.yaml", "port: true", "must be a value"),
        ("a.yaml", "- a", "maps names to values"),
        ("a.yaml", "a: [", "cannot be read"),
        ("a.json", "{", "cannot be read"),
        ("a.toml", "a", "cannot be read"),
        ("a.ini", "a", "ends in .yaml, .yml, .toml or .json"),
    ],
)
def test_a_file_that_is_wrong_says_what(told, tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    assert said in told("--config", tmp_path / name)
    assert "cannot be read" in told("--config", tmp_path / "none.yaml")


def test_what_contradicts_is_refused_before_a_model_is_loaded(told):
    assert "go together" in told("tiny", "--ssl-certfile", "a.pem")
    assert "block_size is 0" in told("tiny", "--block-size", 0)
    assert "--log-level is 'loud'" in told("tiny", "--log-level", "loud")
    assert "--port is 70000" in told("tiny", "--port", 70000)
    assert "--shutdown-timeout is -1.0" in told("tiny", "--shutdown-timeout", "-1")
    assert "--api-key is empty" in told("tiny", "--api-key", "")
    assert "No such option" in told("tiny", "--quantisation", "fp8")


def test_a_port_that_is_taken_is_known_at_once(monkeypatch, capsys):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("refimpl.server.command._log_to_stderr", lambda level: None)  # the logger is everybody's
        monkeypatch.setattr(sys, "argv", ["refimpl", "serve", "tiny", "--port", str(port)])
        with pytest.raises(SystemExit):
            main()
    assert "cannot be listened on" in capsys.readouterr().err


# ---------------------------------------------------------------------- a process of its own


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """``refimpl serve`` with many flags."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "flags.yaml").write_text("block-size: 8\nnum-gpu-blocks-override: 64\nmax-model-len: 256\nmax-n: 2\n")
    flags = ["--port", "0", "--config", folder / "flags.yaml", "--max-num-seqs", "2", "--max-num-batched-tokens", "32"]
    flags += ["--no-enable-prefix-caching", "--num-speculative-tokens", "2", "--swap-space", "0.1"]
    flags += ["--use-v2-block-manager", "--api-key", "secret"]
    with served(folder, *flags) as running:
        yield running


def test_a_served_process_answers_logs_and_ends(process):
    url = process.url
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}, timeout=30, trust_env=False) as client:
        ask_it(client, url)
    process.end()
    check_log(process.log.read_text())


def ask_it(client, url):
    body = {"prompt": "the same prompt, " * 4, "max_tokens": 5, "seed": 1}
    for _ in range(2):  # no prefix is found the second time: --no-enable-prefix-caching
        reply = client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
        assert reply.status_code == 200
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 256
    assert client.post("/v1/completions", json=body | {"n": 3}).json()["error"]["code"] == "limit_exceeded"
    assert httpx.post(f"{url}/v1/completions", json=body, trust_env=False).status_code == 401


def check_log(text):
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    first = next(line for line in lines if line["request_id"] == "mine")
    assert (first["path"], first["status"], first["completion_tokens"]) == ("/v1/completions", 200, 5)
    assert [line["status"] for line in lines if line["path"] == "/v1/completions"] == [200, 200, 400, 401]
    assert "--use-v2-block-manager changes nothing" in text
    assert "method ngram, up to 2 drafts" in text
    assert "secret" not in text
    assert "the same prompt" not in text
    assert "Traceback" not in text


def test_without_the_extra_the_command_says_what_to_install():
    code = (
        "import sys, importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'fastapi' else find(name, *a)\n"
        "sys.argv = ['refimpl', 'serve', 'tiny']\n"
        "from refimpl.cli import main\n"
        "assert not {'fastapi', 'uvicorn', 'torch'} & sys.modules.keys()\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "refimpl: refimpl serve needs fastapi: pip install 'refimpl[server]'\n"
