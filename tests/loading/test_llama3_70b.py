"""Llama-3-70B's and 3.1-70B's layout at a small width (64 query heads, 8 of keys and values, 30 shards), used as a user uses
the real ones: from Python, from the command line, in every dtype, and held against transformers."""

import asyncio
import io
import json
import sys

import pytest
import torch
from checkpoint_files import their_logits
from llama3_layout import BEGIN, EOM, EOS, EOT, SIZES_70B, write_llama3
from typer.testing import CliRunner

from refimpl import LLM, AsyncLLM, SamplingParams
from refimpl.bench.app import bench
from refimpl.cli import main
from refimpl.loading.folder import FolderCheckpoint

PROMPT = "The capital of France is unmergeable, and the river that runs through it is the river that runs through the city."
SYSTEM = "A cache keeps what was computed; the next token reads it instead of computing it again."
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
VERSIONS = ["3.0", "3.1"]
POSITIONS = {"3.0": 8192, "3.1": 131_072}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Both versions, written once a session; never changed."""
    return {version: write_llama3(tmp_path_factory.mktemp("70b") / version, version, "70B") for version in VERSIONS}


@pytest.fixture(params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture
def folder(folders, version):
    return folders[version]


@pytest.fixture(scope="module")
def engines(folders):
    """An engine of each in float32, started when it is first asked for."""
    made = {}

    def engine(version):
        if version not in made:
            made[version] = LLM(folders[version], dtype="float32", num_gpu_blocks_override=64)
        return made[version]

    yield engine
    for llm in made.values():
        llm.close()


@pytest.fixture
def run(monkeypatch, capsys):
    """Run ``refimpl …`` in this process: its standard output."""

    def run(*arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", ["refimpl", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        assert not exit.value.code, captured.err
        return captured.out

    return run


def tokens(llm, prompt=PROMPT, params=GREEDY):
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs[0].token_ids


def user(text):
    return {"role": "user", "content": text}


# ---------------------------------------------------------------------- it equals transformers


def test_tokens_and_log_probabilities_equal_those_of_transformers(folder, version, engines):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    [output] = engines(version).generate([PROMPT], asked, use_tqdm=False)
    [sample], ids = output.outputs, output.prompt_token_ids
    laws = their_logits(theirs, ids + sample.token_ids).log_softmax(-1)
    assert laws.std() > 0.5
    assert sample.token_ids == laws[len(ids) - 1 : -1].argmax(-1).tolist(), "token by token"
    given = [*output.prompt_logprobs[1:], *sample.logprobs]
    for law, token_id, listed in zip(laws, (ids + sample.token_ids)[1:], given, strict=False):
        assert listed[token_id].logprob == pytest.approx(float(law[token_id]), abs=2e-4)
        assert max(entry.logprob for entry in listed.values()) == pytest.approx(float(law.max()), abs=2e-4)
    assert len(given) == len(laws) - 1


def test_its_shape_is_the_real_ones(folder, version):
    config = FolderCheckpoint(folder).config
    assert {key: getattr(config, key) for key in SIZES_70B} == SIZES_70B
    assert (config.head_dim, config.tie_word_embeddings, config.context_limit()) == (8, False, POSITIONS[version])
    assert sorted(config.eos_token_ids) == EOS[version]
    assert len(FolderCheckpoint(folder).files()) == 30


# ---------------------------------------------------------------------- chats


@pytest.mark.parametrize(("version", "end"), [(version, end) for version in VERSIONS for end in EOS[version]])
def test_a_chat_is_rendered_by_the_template_and_stops_at_each_end(folder, version, end, engines):
    from transformers import AutoTokenizer

    chat = [{"role": "system", "content": SYSTEM}, user("Who are you?")]
    [output] = engines(version).chat(chat, SamplingParams(max_tokens=5, allowed_token_ids=[end]), use_tqdm=False)
    reference = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert output.prompt_token_ids == reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason, output.outputs[0].text) == ([end], "stop", "")


def test_what_ends_no_text_of_3_0_goes_on(engines):
    reserved = SamplingParams(max_tokens=3, allowed_token_ids=[EOM])
    [output] = engines("3.0").chat([user("Who are you?")], reserved, use_tqdm=False)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([EOM] * 3, "length")


def test_the_second_turn_finds_the_first_in_the_prefix_cache(engines):
    llm = engines("3.1")
    llm.engine.reset_prefix_cache()
    chat = [{"role": "system", "content": SYSTEM}, user("Who are you?")]
    [first] = llm.chat(chat, GREEDY, use_tqdm=False)
    chat += [{"role": "assistant", "content": "A cache."}, user("And what do you keep?")]
    [second] = llm.chat(chat, GREEDY, use_tqdm=False)
    shared = len(first.prompt_token_ids) // 16 * 16 - 16  # the template's end of the first is the second's middle
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= shared > 32
    llm.engine.reset_prefix_cache()
    assert llm.chat(chat, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == second.outputs[0].token_ids


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float64"])
def test_every_dtype_runs(folders, engines, dtype):
    with LLM(folders["3.1"], dtype=dtype, num_gpu_blocks_override=16, max_model_len=256) as llm:
        found = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert len(found) == 12
    if dtype == "float64":
        assert found == tokens(engines("3.1"))


def test_fp8_weights_run_and_say_nearly_the_same(folders, engines):
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    sides = [engines("3.1")]
    with LLM(folders["3.1"], dtype="float32", quantization="fp8", num_gpu_blocks_override=16, max_model_len=256) as llm:
        sides.append(llm)
        [plain, fp8] = [side.generate([PROMPT], asked, use_tqdm=False)[0].prompt_logprobs[1:] for side in sides]
        [given] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert len(given.outputs[0].token_ids) == 12
    ours, theirs = (torch.tensor([next(iter(entry.values())).logprob for entry in side]) for side in (fp8, plain))
    assert not torch.equal(ours, theirs)
    assert torch.corrcoef(torch.stack((ours, theirs)))[0, 1] > 0.93


def test_the_whole_context_can_be_asked_for(folders):
    with LLM(folders["3.1"], dtype="bfloat16", max_model_len=131_072, cpu_kvcache_space=0.2, max_num_seqs=2) as llm:
        assert llm.engine.scheduler.config.max_model_len == 131_072
        assert len(tokens(llm)) == 12


@pytest.mark.parametrize("version", VERSIONS)
def test_without_a_wish_the_context_is_the_models(folder, version, engines):
    with LLM(folder, dtype="bfloat16", cpu_kvcache_space=0.2, max_num_seqs=2) as llm:
        assert llm.engine.scheduler.config.max_model_len == POSITIONS[version]
    assert engines(version).engine.scheduler.config.max_model_len == 64 * 16, "or what the cache holds"


def test_n_gram_drafts_change_no_token(folders, engines):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    few = [40, 41, 42]  # of so few tokens something comes again
    longer = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, allowed_token_ids=few)
    expected = tokens(engines("3.1"), params=longer)
    with LLM(folders["3.1"], dtype="float32", num_gpu_blocks_override=64, speculative_config=drafts) as llm:
        [output] = llm.generate([PROMPT], longer, use_tqdm=False)
    assert output.outputs[0].token_ids == expected
    assert output.metrics.num_drafts > 0


def test_the_asynchronous_engine_gives_the_same(folders, engines):
    async def streamed():
        async with AsyncLLM(folders["3.0"], dtype="float32", num_gpu_blocks_override=64) as llm:
            found = []
            asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind="delta")
            async for output in llm.generate(PROMPT, asked):
                found += output.outputs[0].token_ids
            return found

    assert asyncio.run(asyncio.wait_for(streamed(), 60)) == tokens(engines("3.0"))


# ---------------------------------------------------------------------- the command line


SMALL = ("--dtype", "float32", "--num-gpu-blocks-override", 64)


def test_generate(folders, run, engines):
    out = run("generate", "--model", folders["3.0"], *SMALL, "--json", "--max-tokens", 12, "--ignore-eos", PROMPT)
    given = json.loads(out)
    assert given["prompt_token_ids"][0] == BEGIN
    assert given["outputs"][0]["token_ids"] == tokens(engines("3.0"))


def test_chat(folders, run, engines):
    options = ("--system", SYSTEM, "--temperature", 0, "--max-tokens", 12, "--ignore-eos")
    out = run("chat", folders["3.1"], *SMALL, *options, stdin="Who are you?\n")
    chat = [{"role": "system", "content": SYSTEM}, user("Who are you?")]
    [expected] = engines("3.1").chat(chat, GREEDY, use_tqdm=False)
    assert out == f"{expected.outputs[0].text}\n"


def test_doctor(folder, version, run):
    report = json.loads(run("doctor", folder, "--dtype", "bfloat16", "--json"))
    found = {finding["name"]: finding for finding in report["findings"]}
    assert f"contexts of {POSITIONS[version]:,} tokens" in found[str(folder)]["value"]
    assert found[str(folder)]["status"] == "ok"
    assert "blocks of 16 tokens" in found["KV cache"]["value"]


def test_its_shape_can_be_benchmarked(folders):
    asked = ["throughput", "--model-config", str(folders["3.1"]), "--rows", "decode-2", "--repeats", "1", "--scale", "0.02"]
    found = CliRunner().invoke(bench, [*asked, "--json", *map(str, SMALL)])
    assert found.exit_code == 0, found.output
    row = json.loads(found.stdout)["results"]["decode-2"]
    assert (row["requests"], row["output_tokens"]) == (2, 10)
    assert row["output_tokens_per_second"] > 0


def test_an_end_of_turn_can_be_asked_for_as_a_token(engines):
    """What a user passes who stops at ids of their own: the same id, by hand."""
    stop = SamplingParams(max_tokens=4, ignore_eos=True, stop_token_ids=[EOT], allowed_token_ids=[EOT])
    [output] = engines("3.1").chat([user("Who are you?")], stop, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", EOT)
