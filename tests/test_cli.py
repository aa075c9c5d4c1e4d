"""The command line: what it prints, and how it fails: two lines at most, exit code 2, no traceback."""

import dataclasses
import inspect
import io
import json
import signal
import struct
import subprocess
import sys
import typing

import pytest

from refimpl import LLM, Engine, EngineArgs, GenerationInterrupted, SamplingParams
from refimpl.cli import bench, main, quantize, speculate
from refimpl.cli_options import SAMPLING
from refimpl.speculative_config import SpeculativeConfig

ENGINE_OPTIONS = {option.name for args in (EngineArgs, SpeculativeConfig) for option in dataclasses.fields(args)}


@pytest.fixture
def run(monkeypatch, capsys):
    """Run ``refimpl …`` in this process: (exit code, stdout, stderr)."""

    def run(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["refimpl", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin or ""))
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        return exit.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def objects(run):
    """Run ``refimpl generate --json --model tiny …``: the objects that it printed."""

    def objects(*arguments, stdin=None):
        code, out, err = run("generate", "--model", "tiny", "--json", "--max-tokens", 4, *arguments, stdin=stdin)
        assert (code, err) == (0, "")
        assert out.endswith("\n")
        return [json.loads(line) for line in out[:-1].split("\n")]

    return objects


@pytest.fixture
def refused(run):
    """Run a command that must fail; its message."""

    def refused(*arguments, stdin=None):
        code, out, err = run(*arguments, stdin=stdin)
        assert code == 2, err
        assert out == ""
        assert err.startswith("refimpl: ")
        assert len(err.splitlines()) <= 2
        assert "Traceback" not in err
        return err

    return refused


# ---------------------------------------------------------------------- what it prints


def test_json_is_one_object_a_prompt(objects):
    hello, bye = objects("Hello", "Bye \u2028 ü")
    assert list(hello) == ["prompt", "prompt_token_ids", "outputs", "metrics"]
    assert hello["prompt"] == "Hello"
    assert hello["prompt_token_ids"] == list(b"Hello")
    [sample] = hello["outputs"]
    assert list(sample) == ["index", "text", "token_ids", "finish_reason", "stop_reason"]
    assert sample["index"] == 0
    assert len(sample["token_ids"]) == 4
    assert sample["finish_reason"] == "length"
    assert sample["stop_reason"] is None
    assert bye["prompt"] == "Bye \u2028 ü"
    metrics = hello["metrics"]
    times = metrics["token_times"][0]
    assert metrics["arrival_time"] <= metrics["first_scheduled_time"] <= metrics["first_token_time"] == times[0]
    assert times == sorted(times)
    assert len(times) == 4
    assert metrics["finished_time"] >= times[-1]
    assert metrics["time_to_first_token"] >= 0
    assert len(metrics["inter_token_latencies"][0]) == 3
    assert metrics["num_preemptions"] == 0


def test_json_is_what_generate_returns(objects):
    with LLM("tiny", seed=5) as llm:
        params = SamplingParams(n=3, temperature=0.8, top_p=0.9, top_k=50, max_tokens=4)
        expected = llm.generate(["one", "two"], params, use_tqdm=False)
    options = ["--n", 3, "--temperature", 0.8, "--top-p", 0.9, "--top-k", 50, "--seed", 5]
    got = objects("one", "two", *options)
    assert [[s["token_ids"] for s in o["outputs"]] for o in got] == [[s.token_ids for s in o.outputs] for o in expected]
    assert [[s["text"] for s in o["outputs"]] for o in got] == [[s.text for s in o.outputs] for o in expected]
    assert [s["index"] for s in got[0]["outputs"]] == [0, 1, 2]
    other = objects("one", "two", *options[:-1], 6)
    assert got[0]["outputs"] != other[0]["outputs"]


def test_the_default_is_greedy(objects):
    assert objects("Hello")[0]["outputs"] == objects("Hello", "--temperature", 0, "--seed", 9)[0]["outputs"]


def test_prompts_file(objects, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        '{"prompt": "one"}',
        "",
        '{"prompt_token_ids": [1, 2, 3]}',
        '"a string with \u2028 in it"',
        '{"prompt": "x", "id": 7}',
    ]
    file.write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    given, one, ids, string, other = objects("given", "--prompts-file", file)
    assert [o["prompt"] for o in (given, one, ids, string, other)] == [
        "given",
        "one",
        None,
        "a string with \u2028 in it",
        "x",
    ]
    assert ids["prompt_token_ids"] == [1, 2, 3]


def test_prompts_from_standard_input(objects):
    assert [o["prompt"] for o in objects("--prompts-file", "-", stdin='"a"\n{"prompt": "b"}\n')] == ["a", "b"]


def test_a_prompt_that_looks_like_an_option(objects):
    assert objects("--", "--json")[0]["prompt"] == "--json"


def test_chat(objects):
    with LLM("tiny") as llm:
        [expected] = llm.chat(
            [{"role": "user", "content": "Hi"}], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
        )
    [got] = objects("--chat", "Hi")
    assert got["prompt"] == "Hi"
    assert got["prompt_token_ids"] == expected.prompt_token_ids
    assert got["outputs"][0]["token_ids"] == expected.outputs[0].token_ids


def test_text_for_people(run):
    code, out, err = run("generate", "--model", "tiny", "--max-tokens", 3, "Hello [bold]you[/bold]")
    assert (code, err) == (0, "")
    assert out.startswith("Hello [bold]you[/bold]")
    code, out, err = run("generate", "--model", "tiny", "--max-tokens", 3, "--n", 2, "One", "Two")
    assert (code, err) == (0, "")
    assert "One — sample 0" in out
    assert "Two — sample 1" in out


@pytest.fixture
def written(monkeypatch, run):
    """Run ``refimpl generate --model tiny …``: (exit code, each write to stdout that says something)."""

    class Out(io.StringIO):
        encoding, terminal = "utf-8", False

        def isatty(self):
            return self.terminal

        def write(self, text):
            if text:
                writes.append(text)
            return super().write(text)

    writes = []

    def written(*arguments, terminal=False):
        writes.clear()
        out = Out()
        out.terminal = terminal
        monkeypatch.setattr(sys, "stdout", out)
        code, _, _ = run("generate", "--model", "tiny", *arguments)
        return code, list(writes)

    return written


LONG = ("--temperature", 1, "--seed", 3, "--max-tokens", 40, "--ignore-eos")


@pytest.mark.parametrize("terminal", [False, True])
def test_one_text_is_printed_as_it_comes(written, objects, terminal):
    """Through a pipe too; there it is the prompt and the text, and nothing else."""
    text, answer = (objects(*how, "Hello\n", *LONG)[0]["outputs"][0]["text"] for how in ([], ["--chat"]))
    code, writes = written("Hello\n", *LONG, terminal=terminal)
    assert code == 0
    assert writes[0] == ("\x1b[2mHello\n\x1b[0m" if terminal else "Hello\n")
    assert "".join(writes[1:]) == text + "\n"
    assert len(writes) > 15
    assert "".join(written("--chat", "Hello\n", *LONG)[1]) == answer + "\n"


def test_stop_ends_the_text(written, objects):
    text = objects("Hello", *LONG)[0]["outputs"][0]["text"]
    stops = ["--stop", text[9:11], "--stop", text[6:8]]
    [sample] = objects("Hello", *LONG, *stops)[0]["outputs"]
    assert (sample["text"], sample["finish_reason"], sample["stop_reason"]) == (text[:6], "stop", text[6:8])
    assert "".join(written("Hello", *LONG, *stops)[1]) == f"Hello{text[:6]}\n"


def test_each_sampling_option_is_a_parameter_with_its_default():
    made = SamplingParams()
    for name, (_, default, _) in SAMPLING.items():
        assert (getattr(made, name) or None) == (default or None), name
    left = {"n", "seed", "logit_bias", "logits_hook", "detokenize", "output_kind", "return_logits", "return_hidden_states"}
    assert SAMPLING.keys() == set(SamplingParams.__struct_fields__) - left, "every other one can be given"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_sampling_options_reach_the_request(run, monkeypatch, command):
    seen = []
    module = "refimpl.cli_output.GenerateCommand.run" if command == "generate" else "refimpl.chat_command.ChatTerminal.run"
    asked = (
        (lambda self, *_: seen.append(self.params) or True)
        if command == "generate"
        else (lambda self: seen.append(self.chat.params))
    )
    monkeypatch.setattr(module, asked)
    given = {
        "min-tokens": 2, "max-tokens": 9, "presence-penalty": 0.5, "frequency-penalty": -1, "repetition-penalty": 1.2,
        "min-p": 0.1, "top-k": 3, "top-p": 0.5, "temperature": 0.3,
    }  # fmt: skip
    flags = ["--ignore-eos", "--no-skip-special-tokens", "--include-stop-str-in-output"]
    several = ["--stop", "a", "--stop", "b", "--stop-token-ids", 5, "--bad-words", "x", "--allowed-token-ids", 7]
    prompt = ["Hello"] if command == "generate" else []
    options = [item for name, value in given.items() for item in (f"--{name}", value)]
    assert run(command, "--model", "tiny", *prompt, *options, *flags, *several)[0] == 0
    [params] = seen
    assert {name: getattr(params, name.replace("-", "_")) for name in given} == given
    assert (params.ignore_eos, params.skip_special_tokens, params.include_stop_str_in_output) == (True, False, True)
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (5,))
    assert (params.bad_words, params.allowed_token_ids) == (("x",), (7,))


def test_log_probabilities_are_printed_with_json_alone(objects, refused):
    [output] = objects("Hello", "--logprobs", 2, "--prompt-logprobs", 0)
    [sample] = output["outputs"]
    assert len(sample["logprobs"]) == len(sample["token_ids"])
    for token_id, found in zip(sample["token_ids"], sample["logprobs"], strict=True):
        assert found[str(token_id)]["rank"] == 1  # greedy
        assert len(found) == 2
    own = [found[str(token_id)]["logprob"] for token_id, found in zip(sample["token_ids"], sample["logprobs"], strict=True)]
    assert sample["cumulative_logprob"] == pytest.approx(sum(own))
    first, *rest = output["prompt_logprobs"]
    assert (first, [list(found) for found in rest]) == (None, [[str(i)] for i in output["prompt_token_ids"][1:]])
    assert "logprobs" not in objects("Hello")[0]["outputs"][0]
    assert "--json" in refused("generate", "--model", "tiny", "Hello", "--logprobs", 1)


def test_ctrl_c_leaves_what_was_printed(written, monkeypatch):
    step, steps = Engine.step, []

    def interrupted(engine):
        steps.append(1)
        if len(steps) == 20:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    whole = "".join(written("Hello", *LONG)[1])
    monkeypatch.setattr(Engine, "step", interrupted)
    code, writes = written("Hello", *LONG)
    said = "".join(writes)
    assert code == 130
    assert said.endswith("\n")
    assert whole.startswith(said[:-1])
    assert len(writes) > 5


def test_ctrl_c_prints_the_prompts_that_had_finished(run, monkeypatch):
    generate = LLM.generate

    def interrupted(llm, prompts, *arguments, **options):
        [first] = generate(llm, prompts[:1], *arguments, **options)
        raise GenerationInterrupted([first, None])

    monkeypatch.setattr(LLM, "generate", interrupted)
    code, out, err = run("generate", "--model", "tiny", "--json", "one", "two")
    assert code == 130
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["one"]
    assert err.splitlines()[-2:] == ["refimpl: 1 of 2 prompts had finished", "refimpl: interrupted"]


def test_a_reader_that_has_enough_is_no_failure_to_tell():
    command = (
        f"{sys.executable} -c 'from refimpl.cli import main; main()' generate --model tiny --ignore-eos Hello | head -c 5"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=280)
    assert (done.stdout, done.stderr) == (b"Hello", b"")


def test_explain_goes_to_stderr(run):
    code, out, err = run("generate", "--model", "tiny", "--json", "--max-tokens", 3, "--explain", "Hello")
    assert code == 0
    assert len(out.splitlines()) == 1
    assert "is admitted to slot 0" in err


def test_engine_options_reach_the_engine(objects):
    tight = ["--block-size", 4, "--num-gpu-blocks-override", 3, "--no-enable-chunked-prefill", "--max-model-len", 12]
    [output] = objects("12345678", *tight, "--dtype", "float64", "--ignore-eos", "--max-tokens", 50)
    assert len(output["outputs"][0]["token_ids"]) == 4
    assert output["outputs"][0]["finish_reason"] == "length"


def test_help_names_every_engine_option(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run("generate", "--help")
    assert code == 0
    for field in dataclasses.fields(EngineArgs):
        if field.metadata.get("cli", True):  # else it is an object, for Python only
            assert f"--{field.name.replace('_', '-')} " in out, field.name


def test_speculation_by_flags_is_that_by_json(objects, monkeypatch):
    seen = []
    checked = EngineArgs.from_options
    monkeypatch.setattr(EngineArgs, "from_options", lambda options: seen.append(checked(options)) or checked(options))
    plain = objects("12121212")
    as_json = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "adaptive": false}']
    flags = ["--speculative-method", "ngram", "--num-speculative-tokens", 3]
    for options in (as_json, [*flags, "--speculative-config", '{"adaptive": false}'], [*as_json, *flags]):
        assert objects("12121212", *options)[0]["outputs"] == plain[0]["outputs"]
        found = seen[-1].speculative_config
        assert (found.method, found.num_speculative_tokens, found.adaptive) == ("ngram", 3, False)
    assert seen[0].speculative_config is None
    objects("1212", "--speculative-model", "tiny")
    assert (seen[-1].speculative_config.method, seen[-1].speculative_config.model) == ("draft_model", "tiny")
    objects("1212", "--num-speculative-tokens", 2)
    assert (seen[-1].speculative_config.method, seen[-1].speculative_config.num_speculative_tokens) == ("ngram", 2)


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["bench", "batching"]])
def test_every_command_with_an_engine_has_the_flags_of_speculation(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(*command, "--help")
    assert code == 0
    for flag in ("--speculative-config", "--speculative-method", "--speculative-model", "--num-speculative-tokens"):
        assert f"{flag} " in out


# ---------------------------------------------------------------------- how it fails


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--num-speculative-tokens", 3, "--speculative-config", '{"num_speculative_tokens": 4}'], "give one of the two"),
        (["--speculative-method", "ngram", "--speculative-config", '{"method": "head"}'], "--speculative-method is 'ngram'"),
        (["--speculative-method", "ngram", "--speculative-model", "tiny"], "leave out model"),
        (["--speculative-method", "draft_model"], "needs model"),
        (["--speculative-method", "guess"], "must be one of ngram, draft_model, head"),
        (["--num-speculative-tokens", 0], "num_speculative_tokens is 0"),
        (["--num-speculative-tokens", 99], "num_speculative_tokens is 99"),
        (["--num-speculative-tokens", 2, "--speculative-config", "{"], "no JSON"),
        (["--num-speculative-tokens", 2, "--speculative-config", "[2]"], "must be an object"),
        (["--speculative-config", '{"num_drafts": 2}'], "unknown option 'num_drafts'"),
        (["--num-speculative-tokens", 2, "--no-enable-kv-cache"], "leave it out"),
    ],
)
def test_contradictions_of_speculation(refused, options, said):
    assert said in refused("generate", "--model", "tiny", "hi", *options)


def test_a_piped_text_is_a_prompt(objects):
    assert [o["prompt"] for o in objects(stdin="Hello\n")] == ["Hello"]


def test_no_prompt(refused, tmp_path):
    assert "no prompt" in refused("generate", "--model", "tiny")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    assert "no prompt" in refused("generate", "--model", "tiny", "--prompts-file", empty)
    assert "no prompt" in refused("generate", "--model", "tiny", "--prompts-file", "-", stdin="")


def test_bad_prompts(refused):
    assert refused("generate", "--model", "tiny", "") == "refimpl: the prompt is empty; give at least one token\n"
    message = refused("generate", "--model", "tiny", "--json", "good", "")
    assert "prompt 1 of 2" in message
    message = refused("generate", "--model", "tiny", "--max-model-len", 8, "12345678")
    assert "8 tokens" in message
    assert "max_model_len" in message
    assert "chat" in refused(
        "generate", "--model", "tiny", "--chat", "--prompts-file", "-", stdin='{"prompt_token_ids": [1]}'
    )


@pytest.mark.parametrize(
    "ids", ["[320]", "[-1]", "[1, 99999999999]", "[]", '["a"]', "[1.5]", "[true]", '"abc"', "7", "null"]
)
def test_bad_ids(refused, ids):
    message = refused(
        "generate", "--model", "tiny", "--json", "--prompts-file", "-", stdin=f'"good"\n{{"prompt_token_ids": {ids}}}'
    )
    if ids in ("[320]", "[-1]", "[1, 99999999999]"):
        assert "outside the vocabulary: ids go from 0 to 319" in message


@pytest.mark.parametrize("line", ["{", "nonsense", "[1, 2]", "5", "null", "{}", '{"text": "a"}', '{"prompt": 5}'])
def test_bad_lines(refused, line, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"good"\n' + line + "\n")
    message = refused("generate", "--model", "tiny", "--prompts-file", file)
    assert line == '{"prompt": 5}' or "line 2" in message


def test_prompts_files_that_cannot_be_read(refused, tmp_path):
    assert "missing.jsonl" in refused("generate", "--prompts-file", tmp_path / "missing.jsonl")
    assert "cannot be read" in refused("generate", "--prompts-file", tmp_path)
    (tmp_path / "latin").write_bytes(b'"\xff"')
    assert "cannot be read" in refused("generate", "--prompts-file", tmp_path / "latin")


def test_unknown_options_and_commands(refused):
    assert "--max-tokenz" in refused("generate", "--max-tokenz", 5, "hi")
    assert "refimpl generate --help" in refused("generate", "--block_sizes", 5, "hi")
    assert "genrate" in refused("genrate", "hi")
    assert "--max-tokens" in refused("generate", "hi", "--max-tokens")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-tokens", 0),
        ("--max-tokens", "many"),
        ("--temperature", -1),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--top-p", 1.5),
        ("--top-k", -2),
        ("--presence-penalty", 3),
        ("--min-tokens", 10**6),
        ("--stop-token-ids", -1),
        ("--logprobs", -5),
        ("--n", 0),
        ("--n", 1.5),
        ("--dtype", "float8"),
        ("--device", "tpu"),
        ("--device", "cuda:99"),
        ("--seed", "x"),
        ("--block-size", 0),
        ("--max-num-seqs", 0),
        ("--max-num-batched-tokens", 0),
        ("--max-model-len", 10**9),
        ("--num-gpu-blocks-override", 0),
        ("--kv-cache-memory-bytes", 1),
        ("--gpu-memory-utilization", 0),
        ("--cpu-kvcache-space", -1),
        ("--cpu-kvcache-space", "nan"),
        ("--attention-backend", "magic"),
        ("--load-format", "pickle"),
        ("--event-log-size", -1),
    ],
)
def test_bad_option_values(refused, option, value):
    message = refused("generate", "--model", "tiny", "hi", option, value)
    name = option[2:]
    if option != "--kv-cache-memory-bytes":  # says how many bytes are needed
        assert name in message or name.replace("-", "_") in message


def test_models_that_are_not_there(refused, tmp_path):
    for model in ("./nowhere", str(tmp_path / "nowhere"), "nowhere", "a/b/c", "x.gguf"):
        assert "no model at" in refused("generate", "--model", model, "hi")
    assert "config.json" in refused("generate", "--model", tmp_path, "hi")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"not a model at all, but long enough to be read",
        struct.pack("<4sIQQ", b"GGUF", 3, 2**40, 2**40),
        struct.pack("<4sIQQ", b"GGUF", 99, 1, 1),
        struct.pack("<4sIQQ", b"GGUF", 3, 5, 5) + b"\x01" * 100,
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 0),
    ],
    ids=["empty", "cut header", "text", "absurd counts", "other version", "garbage", "no metadata"],
)
def test_a_damaged_gguf_file(refused, tmp_path, content):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert "model.gguf" in refused("generate", "--model", file, "hi")


@pytest.fixture
def folder(tmp_path):
    """A checkpoint folder of the tiny model."""
    from safetensors.torch import save_file

    from refimpl import tiny
    from refimpl.loading.hf_config import write_config

    checkpoint = tiny()
    write_config(checkpoint.config, tmp_path)
    save_file({name: tensor.float() for name, tensor in checkpoint.weights()}, tmp_path / "model.safetensors")
    checkpoint.tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return tmp_path


def test_a_checkpoint_folder_runs(run, folder, objects):
    code, out, err = run("generate", "--model", folder, "--json", "--max-tokens", 4, "Hello")
    assert (code, err) == (0, "")
    assert json.loads(out)["outputs"] == objects("Hello")[0]["outputs"]


@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "gone", "another shape"])
def test_a_damaged_safetensors_file(refused, folder, damage):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    elif damage == "another shape":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    else:
        file.write_bytes({"cut": content[: len(content) // 2], "garbage": b"\xff" * 1000, "empty": b""}[damage])
    message = refused("generate", "--model", folder, "hi")
    assert "model.safetensors" in message or "misshapen" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "MambaForCausalLM"),
        ({"architectures": None}, "named"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"num_attention_heads": "four"}, "config.json"),
        ({"num_key_value_heads": 3}, "evenly"),
    ],
)
def test_another_architecture(refused, folder, change, said):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert said in refused("generate", "--model", folder, "hi")


def test_a_config_that_is_no_json(refused, folder):
    (folder / "config.json").write_text("{")
    assert "config.json" in refused("generate", "--model", folder, "hi")


def test_ctrl_c_is_exit_code_130(run, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", interrupted)
    code, out, err = run("generate", "--model", "tiny", "hi", "ho")
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "refimpl: interrupted"


# ---------------------------------------------------------------------- as a process


def test_help_and_import_load_no_torch():
    code = (
        "import sys, refimpl, refimpl.cli; sys.argv = ['refimpl', 'generate', '--help']\n"
        "dir(refimpl), refimpl.SamplingParams, refimpl.EngineArgs\n"
        "try: refimpl.cli.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'tqdm'} & set(sys.modules)\n"
        "print('loaded:', sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "loaded: []"


def test_the_installed_command():
    command = [sys.executable, "-c", "from refimpl.cli import main; main()", "generate", "--model", "tiny", "--json"]
    done = subprocess.run([*command, "--max-tokens", "3", "Grüße"], capture_output=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, b"")
    [line] = done.stdout.decode().splitlines()
    assert json.loads(line)["prompt"] == "Grüße"


@pytest.mark.parametrize("commands", [bench, quantize, speculate], ids=lambda commands: commands.info.help[:12])
def test_no_command_counts_less_than_nothing(commands):
    for command in commands.registered_commands:
        for name, parameter in inspect.signature(command.callback, eval_str=True).parameters.items():
            kind, *marks = typing.get_args(parameter.annotation) or [None]
            if kind in (int, int | None) and "seed" not in name and name not in ENGINE_OPTIONS:
                assert marks[0].min in (0, 1, 2), f"{command.callback.__name__}: {name} may be negative"


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf"])
def test_a_size_that_is_none_is_refused(run, tmp_path, size):
    code, _, err = run("quantize", "awq", "tiny", "--no-search", "--out", tmp_path / "q", "--shard-gigabytes", size)
    assert code == 2
    assert "--shard-gigabytes" in err
    assert not (tmp_path / "q").exists()
