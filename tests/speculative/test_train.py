"""Training end to end on the tiny model: what it writes, that it goes on where it was, and what its figures mean."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from refimpl.errors import CheckpointError, ConfigError
from refimpl.llm import LLM
from refimpl.loading.checkpoint import open_checkpoint
from refimpl.models.tiny import tiny
from refimpl.sampling_params import SamplingParams
from refimpl.speculate.acceptance import measure_acceptance
from refimpl.speculate.commands import speculate
from refimpl.speculate.dense import frozen_target, run_target
from refimpl.speculate.drafters import frequent_tokens
from refimpl.speculate.loss import batches_of, in_batches, learning_rate
from refimpl.speculate.self_text import ChatFrame, SelfWriter, Texts, cut_loops, load_texts, looping
from refimpl.speculate.train import Training, TrainOptions
from refimpl.speculative.head_files import load_head, read_head_config

SMALL = {"tokens": 300, "held_out": 4, "max_tokens": 40, "steps": 6, "batch_tokens": 256, "draft_vocab_size": 64}
ENGINE = {"dtype": "float64", "max_num_seqs": 16}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("head")
    return out, Training(tiny(), out, TrainOptions(**SMALL), ENGINE, command="refimpl speculate train").run()


def test_a_head_is_written_with_its_report_and_loads(trained):
    out, report = trained
    told = json.loads((out / "report.json").read_text())
    assert told["command"] == "refimpl speculate train"
    assert told["options"]["seed"] == 0
    assert (out / "training.svg").read_text().startswith("<svg")
    assert read_head_config(out).target_fingerprint == tiny().fingerprint() == report.target_fingerprint
    model = frozen_target(tiny(), torch.float32, CPU)
    head = load_head(out, model, "tiny", tiny().fingerprint())
    assert head.config.num_parameters == report.num_parameters
    assert report.answer_tokens >= SMALL["tokens"]
    assert len(report.history) == SMALL["steps"]


def test_an_interrupted_training_goes_on_to_the_same_weights(trained, tmp_path):
    out, report = trained

    def stop(step):
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Training(tiny(), tmp_path, TrainOptions(**SMALL), ENGINE, after_step=stop).run()
    assert not (tmp_path / "model.safetensors").exists()
    steps = []
    again = Training(tiny(), tmp_path, TrainOptions(**SMALL), ENGINE, after_step=steps.append).run()
    assert steps == [3, 4, 5]
    assert (tmp_path / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert again.history == report.history


def test_a_target_in_16_bits_trains_a_head_in_32(tmp_path):
    report = Training(tiny(), tmp_path, TrainOptions(**SMALL), ENGINE | {"dtype": "bfloat16"}).run()
    assert report.history[-1].loss < report.history[0].loss
    assert len(report.acceptance) == 2


def test_a_folder_of_other_options_is_refused(trained):
    out, _ = trained
    with pytest.raises(ConfigError, match="other options \\(steps was 6, is 7\\)"):
        Training(tiny(), out, TrainOptions(**SMALL | {"steps": 7}), ENGINE).run()


def test_a_damaged_state_says_what_to_remove(trained, tmp_path):
    out, _ = trained
    (tmp_path / "training").mkdir()
    for path in (out / "training").iterdir():
        (tmp_path / "training" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "training" / "state.safetensors").write_bytes(b"no state")
    with pytest.raises(CheckpointError, match="remove it to begin anew"):
        Training(tiny(), tmp_path, TrainOptions(**SMALL), ENGINE).run()


def test_training_brings_the_drafter_nearer(tmp_path):
    """A target of few words, whose next token hangs on the last two alone: the head learns most of it."""
    target = tiny(vocab_size=12, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    options = TrainOptions(**SMALL | {"tokens": 1000, "steps": 40, "draft_vocab_size": 12, "learning_rate": 5e-3})
    report = Training(_with_beginning(target), tmp_path, options, ENGINE).run()
    first, last = report.history[:5], report.history[-5:]
    assert sum(step.loss for step in last) < 0.5 * sum(step.loss for step in first)
    assert report.acceptance[0].by_position[0] > 1.3 * np.mean([step.acceptance[0] for step in first])


def _with_beginning(target):
    """A model without chat template needs a token that begins a text."""
    return dataclasses.replace(target, config=dataclasses.replace(target.config, bos_token_id=0))


def test_a_llama_drafter_is_a_checkpoint_with_the_targets_tokenizer(tmp_path):
    options = TrainOptions(**SMALL | {"kind": "llama", "hidden_size": 32, "layers": 1})
    report = Training(tiny(), tmp_path, options, ENGINE).run()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.num_hidden_layers == 1
    assert checkpoint.config.num_parameters == report.num_parameters
    assert checkpoint.tokenizer().encode("Hello") == tiny().tokenizer().encode("Hello")
    with LLM(str(tmp_path), dtype="float32") as llm:
        assert len(llm.generate([[1, 2, 3]], use_tqdm=False)[0].outputs[0].token_ids) > 0


def test_the_command_trains_and_prints_acceptance(tmp_path):
    arguments = ["train", "--target", "tiny", "--out", str(tmp_path), "--tokens", "100", "--held-out", "2"]
    arguments += ["--max-tokens", "40", "--steps", "2", "--batch-tokens", "128", "--attends", "none"]
    done = CliRunner().invoke(speculate, arguments)
    assert done.exit_code == 0, done.output
    assert "T = 0.7, outside loops" in done.output
    assert json.loads((tmp_path / "report.json").read_text())["options"]["attends"] == [None]
    wrong = CliRunner().invoke(speculate, [*arguments[:-1], "x"])
    assert "attends is 'x'" in str(wrong.exception)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"kind": "eagle"}, "head, llama"), ({"steps": 0}, "steps is 0"), ({"temperature": 0.0}, "above 0")],
)
def test_wrong_options_are_refused_at_once(changed, message):
    with pytest.raises(ConfigError, match=message):
        TrainOptions(**changed)


# ---------------------------------------------------------------------- what acceptance is


class Fixed:
    """A drafter of known distributions: the target's logits, changed by ``change``."""

    kept_layers = ()
    steps = 1
    vocabulary = None

    def __init__(self, target, change):
        self._target, self._change = target, change

    def states(self, batch, steps):
        for i in range(1, steps + 1):
            yield batch.ahead(batch.hidden, i)

    def logits(self, state):
        return self._change(self._target.compute_logits(state))


def measured(change, temperature, positions=3):
    target = frozen_target(tiny(), torch.float64, CPU)
    generator = np.random.default_rng(0)
    texts = Texts.of([(generator.integers(0, 320, 30).tolist(), 3) for _ in range(3)])
    batch = run_target(target, texts, [0, 1, 2], np.zeros(90, dtype=bool), ())
    return target, batch, measure_acceptance(target, Fixed(target, change), [batch], temperature, positions)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_drafter_that_is_the_target_is_always_accepted(temperature):
    *_, found = measured(lambda logits: logits, temperature)
    assert found.by_position == pytest.approx([1.0] * 3)
    assert found.tokens_a_round(2) == pytest.approx(3)
    assert found.tokens == 3 * 27 - 3 + 3


def test_acceptance_is_the_overlap_and_later_positions_are_weighted_by_the_way_there():
    change = lambda logits: 0.5 * logits + torch.arange(320) % 3  # noqa: E731
    target, batch, found = measured(change, 0.7)
    accepted, reached = np.zeros(3), np.zeros(3)
    for n in range(3):
        for t in range(2, 30):
            weight = 1.0
            for i in (1, 2, 3):
                if t + i >= 30:
                    break
                logits = target.compute_logits(batch.hidden[n, t + i][None])[0]
                p, q = (logits / 0.7).softmax(0), (change(logits) / 0.7).softmax(0)
                reached[i - 1] += weight
                accepted[i - 1] += weight * float(torch.minimum(p, q).sum())
                if t + i + 1 < 30:
                    token = batch.token_ids[n, t + i + 1]
                    weight *= min(1.0, float(q[token] / p[token]))
    assert found.by_position == pytest.approx(accepted / reached)


def test_greedy_acceptance_is_agreement_after_agreement():
    change = lambda logits: torch.where(logits.argmax(-1, keepdim=True) % 2 == 0, logits, -logits)  # noqa: E731
    target, batch, found = measured(change, 0.0)
    even = target.compute_logits(batch.hidden.flatten(0, 1)).argmax(-1).view(3, 30) % 2 == 0
    first = even[:, 3:].double()
    assert found.by_position[0] == pytest.approx(first.mean().item())
    assert found.by_position[1] == pytest.approx(first[:, 1:][even[:, 3:29]].mean().item())


# ---------------------------------------------------------------------- the text


@pytest.fixture(scope="module")
def llm():
    with LLM(tiny(), dtype="float64", max_model_len=64, max_num_seqs=8) as llm:
        yield llm


def test_a_chat_is_framed_by_the_template_and_its_answer_is_the_targets(llm):
    frame = ChatFrame.of(llm.get_tokenizer(), llm.engine.model_config)
    texts = SelfWriter(llm, 5, 48).chats(0, 3, lambda number: 0.0, False)
    for i in range(3):
        prompt, answer = texts[i][: texts.answers[i]].tolist(), texts[i][texts.answers[i] :].tolist()
        assert prompt[: len(frame.header)] == frame.header
        assert prompt[-len(frame.bridge) :] == frame.bridge
        [output] = llm.generate([prompt], _greedy(48 - len(prompt)), use_tqdm=False)
        assert output.outputs[0].token_ids == answer
    assert texts.num_answer_tokens == len(texts.answer_tokens())


def _greedy(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def test_chats_are_a_function_of_seed_and_number(llm):
    together = SelfWriter(llm, 5, 40).chats(0, 4, lambda number: 0.7, False)
    alone = SelfWriter(llm, 5, 40).chats(2, 1, lambda number: 0.7, False)
    other = SelfWriter(llm, 6, 40).chats(2, 1, lambda number: 0.7, False)
    assert together[2].tolist() == alone[0].tolist() != other[0].tolist()
    assert len(together.without(alone)) == 3
    assert len(together.without(other)) == 4


def test_without_a_template_whole_texts_are_held_out():
    told = Texts.of([([0, 1, 2], 1), ([0, 3, 4], 1)])
    held_out = Texts.of([([0, 3, 4], 1), ([0, 5], 1)]).without(told)
    assert held_out.token_ids.tolist() == [0, 5]


def test_a_chat_that_has_no_room_is_refused(llm):
    with pytest.raises(ConfigError, match="no room"):
        SelfWriter(llm, 0, 3)


def by_loops(tokens, most_period=64):
    found = [False] * len(tokens)
    for t in range(len(tokens)):
        for period in range(1, most_period + 1):
            run = 0
            while t - run - period >= 0 and tokens[t - run] == tokens[t - run - period]:
                run += 1
            found[t] |= run >= max(24, 2 * period)
    return found


def test_loops_are_seen_within_a_chat():
    generator = np.random.default_rng(1)
    random = lambda n: generator.integers(0, 50, n).tolist()  # noqa: E731
    chats = [random(20) + [7] * 40 + random(5), random(30), random(10) + random(13) * 5, [3] * 20, [3] * 20]
    texts = Texts.of([(chat, 4) for chat in chats])
    wanted = [flag for chat in chats for flag in by_loops(chat)]
    assert looping(texts).tolist() == wanted
    assert any(wanted)
    cut = cut_loops(texts)
    assert cut[0].tolist() == chats[0][: wanted.index(True) + 1]
    assert cut[1].tolist() == chats[1]
    assert len(cut[2]) < len(chats[2])
    assert cut.answers.tolist() == [4] * 5


def test_texts_go_to_disk_and_back(trained):
    out, _ = trained
    part = load_texts(out / "training" / "text-0000000.safetensors")
    assert part.lengths.max() <= SMALL["max_tokens"]
    assert (part.answers < part.lengths + 1).all()
    held_out = load_texts(out / "training" / "held-out-greedy.safetensors")
    assert len(held_out) == SMALL["held_out"]


def test_batches_hold_every_text_once_an_epoch_within_the_budget():
    generator = np.random.default_rng(2)
    texts = Texts.of([([1] * n, 1) for n in generator.integers(2, 40, 50).tolist()])
    stream = batches_of(texts, 100, seed=3)
    seen = []
    while len(seen) < 50:
        batch = next(stream)
        assert len(batch) == 1 or len(batch) * texts.lengths[batch].max() <= 100
        seen += batch
    assert sorted(seen) == list(range(50))
    assert list(in_batches(np.array([0]), np.array([500]), 100)) == [[0]]


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 100, 1.0) for step in range(100)]
    assert rates[9] == 1.0
    assert rates[0] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(0.02, abs=0.01)


def test_the_drafted_vocabulary_is_what_the_text_uses_most():
    texts = Texts.of([([9, 9, 5, 5, 5, 7, 7, 300], 2)])
    assert frequent_tokens(texts, tiny().config, 3).tolist() == [5, 7, 256]  # 256 ends a text; 9 stands in the question
