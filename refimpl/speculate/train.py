"""Training a drafter: the target writes, its hidden states are made anew for each batch, and the drafter follows them.

Everything is in one folder: the drafter at its top, as the engine loads it, with a report and a chart; under ``training/``
what a run that is interrupted goes on from: the texts so far, and the last state of weights and optimizer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tqdm import tqdm

from refimpl.errors import ConfigError
from refimpl.executor.device import free_host_memory, resolve_device, resolve_dtype
from refimpl.llm import LLM
from refimpl.loading.checkpoint import Checkpoint, open_checkpoint
from refimpl.models.llama import LlamaForCausalLM
from refimpl.speculate.acceptance import Acceptance, measure_acceptance
from refimpl.speculate.dense import Batch, KeptStates, frozen_target, mixed_precision, run_target
from refimpl.speculate.drafters import KINDS, Drafter, HeadDrafter, LlamaDrafter, frequent_tokens
from refimpl.speculate.loss import batches_of, draft_loss, in_batches, learning_rate
from refimpl.speculate.report import Report, Trained, write_report
from refimpl.speculate.self_text import Texts, cut_loops, load_texts, looping, save_texts
from refimpl.speculate.text_plan import HELD_OUT, TEXT, WORK, TextPlan
from refimpl.speculate.training_state import TrainingState
from refimpl.speculative.head_model import HeadConfig

FEWEST_CHATS_A_ROUND, MOST_CHATS_A_ROUND = 16, 4096
POSITIONS = 5
"""Drafted tokens whose acceptance is measured."""


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, on how much, how long."""

    kind: str = "head"
    """head, or llama: a small model that sees tokens alone."""
    tokens: int = 1_000_000
    """Tokens of answers that the target writes."""
    held_out: int = 100
    """Chats of other seeds by which acceptance is measured, at temperature 0.7 and as many greedy ones."""
    max_tokens: int = 512
    """The longest chat."""
    seed: int = 0
    """Of the text, the first weights and the order of training. What is held out has the next one."""
    steps: int = 2000
    batch_tokens: int = 16_384
    max_seconds: float | None = None
    """After which training ends, however many steps it made; the learning rate falls in time for it. An interrupted run has
    them anew."""
    learning_rate: float = 1e-3
    temperature: float = 0.7
    """At which the drafter is to be close to the target."""
    draft_vocab_size: int = 16_384
    """head: the most frequent tokens, which it drafts."""
    attends: tuple[int | None, ...] = (-1,)
    """head: for each block, the target's layer whose keys it reads (from the end if negative); None: none."""
    intermediate_size: int | None = None
    """head: of each block; None is what makes the head 4.6 million parameters at hidden size 576, and in proportion else."""
    draft_steps: int = 3
    """head: drafted tokens in a row that it is trained on."""
    hidden_size: int = 192
    """llama: its width."""
    layers: int = 2
    """llama: its depth."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")
        for name in (
            "tokens",
            "held_out",
            "steps",
            "batch_tokens",
            "draft_vocab_size",
            "draft_steps",
            "hidden_size",
            "layers",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.temperature > 0 or not self.learning_rate > 0:
            raise ConfigError("temperature and learning_rate must be above 0")


@dataclass
class Training:
    """One training run and its folder.

    Args:
        target: a name or path as ``--model`` takes it, or a checkpoint object.
        out: the folder; a run that is there is gone on with, if its options are the same.
        options: what to train.
        engine: options of the engine that writes the text; its device and dtype are the training's too.
        command: told in the report.
        show_progress: draw progress bars on stderr.
        after_step: called after each step with its number; what it raises ends the run as Ctrl-C does.

    """

    target: Any
    out: Path
    options: TrainOptions = field(default_factory=TrainOptions)
    engine: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    show_progress: bool = False
    after_step: Callable[[int], None] = lambda step: None

    def run(self) -> Report:
        """Train, measure, and write everything. Interrupted, the state so far is kept.

        Raises:
            ConfigError: the folder holds a run of other options.

        """
        began = time.monotonic()
        self._claim_folder()
        checkpoint = open_checkpoint(self.target)
        texts, held_out = self._texts(checkpoint)
        written = time.monotonic()
        device = resolve_device(self.engine.get("device", "auto"))
        dtype = resolve_dtype(self.engine.get("dtype", "auto"), device)
        target = frozen_target(checkpoint, dtype, device)
        drafter = self._drafter(checkpoint, target, texts)
        history = self._train(target, drafter, cut_loops(texts))
        drafter.settle()
        trained = time.monotonic()
        acceptances = [self._measure(target, drafter, *pair) for pair in held_out]
        drafter.save(self.out)
        report = Report(
            kind=self.options.kind,
            target=checkpoint.name,
            target_fingerprint=checkpoint.fingerprint(),
            command=self.command,
            options=self.options,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            num_parameters=sum(weight.numel() for weight in drafter.weights().values()),
            chats=len(texts),
            answer_tokens=texts.num_answer_tokens,
            coverage=self._coverage(drafter, held_out[0][0]),
            acceptance=acceptances,
            seconds={"text": written - began, "training": trained - written, "measuring": time.monotonic() - trained},
            history=history,
        )
        write_report(report, self.out)
        return report

    @property
    def _work(self) -> Path:
        return self.out / WORK

    def _claim_folder(self) -> None:
        """Make the folder, or see that the run that is there is this one."""
        self._work.mkdir(parents=True, exist_ok=True)
        path, wanted = self._work / "options.json", msgspec.json.encode(self.options)
        if path.exists() and path.read_bytes() != wanted:
            there = msgspec.json.decode(path.read_bytes())
            asked = msgspec.json.decode(wanted)
            differ = ", ".join(f"{k} was {there.get(k)}, is {v}" for k, v in asked.items() if there.get(k) != v)
            raise ConfigError(
                f"{self.out} holds a training of other options ({differ}); give another folder, or remove {self._work}"
            )
        path.write_bytes(wanted)

    # ------------------------------------------------------------------ text

    def _texts(self, checkpoint: Checkpoint) -> tuple[Texts, list[tuple[Texts, TextPlan]]]:
        """The training text, and what is held out with its plan: read where it was written before."""
        options, engine = self.options, self._engine_options(checkpoint)
        plan = TextPlan.training(options.seed, options.max_tokens)
        with contextlib.ExitStack() as stack:
            llms: list[LLM] = []

            def llm() -> LLM:
                if not llms:
                    llms.append(stack.enter_context(LLM(checkpoint, **engine)))
                return llms[0]

            parts = [load_texts(path) for path in sorted(self._work.glob(f"{TEXT}*.safetensors"))]
            chats = sum(len(part) for part in parts)
            tokens = sum(part.num_answer_tokens for part in parts)
            while tokens < options.tokens:
                mean_answer = max(1.0, tokens / chats) if chats else options.max_tokens / 3
                count = min(MOST_CHATS_A_ROUND, max(FEWEST_CHATS_A_ROUND, int((options.tokens - tokens) / mean_answer) + 1))
                part = self._written(f"{TEXT}{chats:07}", llm, plan, chats, count)
                parts.append(part)
                chats, tokens = chats + len(part), tokens + part.num_answer_tokens
            texts = Texts.joined(parts)
            held_out = [
                (self._written(f"{HELD_OUT}{name}", llm, held, 0, options.held_out), held)
                for name, held in TextPlan.held_out(options.seed + 1, options.max_tokens).items()
            ]
        new = [(part.without(texts), plan) for part, plan in held_out]
        if not any(len(part) for part, _ in new):
            raise ConfigError(
                f"all {options.held_out} chats that were to be held out stand in the training text too; hold out more"
            )
        return texts, [(part, plan) for part, plan in new if len(part)]

    def _engine_options(self, checkpoint: Checkpoint) -> dict[str, Any]:
        limit = checkpoint.config.context_limit()
        if self.options.max_tokens > limit:
            raise ConfigError(f"max_tokens is {self.options.max_tokens}; {checkpoint.name} has contexts of {limit} at most")
        return {**self.engine, "max_model_len": self.options.max_tokens}

    def _written(self, name: str, llm: Callable[[], LLM], plan: TextPlan, first: int, count: int) -> Texts:
        path = self._work / f"{name}.safetensors"
        if not path.exists():
            save_texts(plan.write(llm(), self.options.max_tokens, first, count, self.show_progress), path)
        return load_texts(path)

    # ------------------------------------------------------------------ training

    def _drafter(self, checkpoint: Checkpoint, target: LlamaForCausalLM, texts: Texts) -> Drafter:
        options, c = self.options, checkpoint.config
        if options.kind == "llama":
            return LlamaDrafter(checkpoint, target, options.hidden_size, options.layers, options.seed)
        vocabulary = frequent_tokens(texts, c, options.draft_vocab_size)
        attends = tuple(None if layer is None else range(c.num_hidden_layers)[layer] for layer in options.attends)
        config = HeadConfig(
            target=checkpoint.name,
            target_fingerprint=checkpoint.fingerprint(),
            hidden_size=c.hidden_size,
            vocab_size=c.vocab_size,
            draft_vocab_size=len(vocabulary),
            num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.rms_norm_eps,
            attends=attends,
            intermediate_size=options.intermediate_size or 10 * c.hidden_size // (3 * len(attends)),
        )
        return HeadDrafter(target, config, vocabulary, options.draft_steps, options.seed)

    def _train(self, target: LlamaForCausalLM, drafter: Drafter, texts: Texts) -> list[Trained]:
        options, began = self.options, time.monotonic()
        weights = drafter.weights()
        optimizer = torch.optim.AdamW(weights.values(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        state = TrainingState(self._work / "state.safetensors", weights, optimizer)
        history = state.restore()
        done = len(history)
        chosen = batches_of(texts, options.batch_tokens, options.seed)
        batch_of = self._batches_from(target, drafter, texts)
        told: list[torch.Tensor] = []
        with state.kept_on_leaving(history, told), self._bar(options.steps, done) as bar:
            for step, texts_of_step in zip(range(options.steps), chosen, strict=False):
                if step < done:  # what an earlier run did, in the same order
                    continue
                spent = (time.monotonic() - began) / options.max_seconds if options.max_seconds else 0.0
                if spent >= 1:
                    break
                batch = batch_of(texts_of_step)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, options.steps, options.learning_rate, spent)
                with mixed_precision(target):
                    loss, overlaps = draft_loss(drafter, batch, options.temperature)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
                optimizer.step()
                told.append(torch.cat((loss.detach()[None], overlaps)))
                bar.update()
                if step % 50 == 49 and state.due():
                    state.save(history, told)
                self.after_step(step)
        return history

    def _batches_from(self, target: LlamaForCausalLM, drafter: Drafter, texts: Texts) -> Callable[[list[int]], Batch]:
        """Batches of the target's states: made once where a half of the free memory holds all, else each time anew."""
        device, layers = target.embed_tokens.device, drafter.kept_layers
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()
        if 2 * KeptStates.num_bytes(target, texts, layers) <= free:
            by_length = np.argsort(texts.lengths, kind="stable")
            return KeptStates(
                target, texts, layers, in_batches(by_length, texts.lengths, 2 * self.options.batch_tokens)
            ).batch
        no_loops = np.zeros(len(texts.token_ids), dtype=bool)
        return lambda chosen: run_target(target, texts, chosen, no_loops, layers)

    def _bar(self, total: int, done: int) -> tqdm[Any]:
        return tqdm(total=total, initial=done, desc="training", unit="step", disable=not self.show_progress)

    # ------------------------------------------------------------------ measuring

    def _measure(self, target: LlamaForCausalLM, drafter: Drafter, texts: Texts, plan: TextPlan) -> Acceptance:
        batches = self._all_batches(target, drafter, texts)
        return measure_acceptance(target, drafter, batches, plan.temperatures[0], POSITIONS, plan.kinds[0])

    def _all_batches(self, target: LlamaForCausalLM, drafter: Drafter, texts: Texts) -> Iterator[Batch]:
        loops = looping(texts)
        by_length = np.argsort(texts.lengths, kind="stable")
        for chosen in in_batches(by_length, texts.lengths, self.options.batch_tokens):
            yield run_target(target, texts, chosen, loops, drafter.kept_layers)

    def _coverage(self, drafter: Drafter, texts: Texts) -> float:
        """The share of held-out answer tokens that the drafter can draft."""
        tokens = texts.answer_tokens()
        if drafter.vocabulary is None or not len(tokens):
            return 1.0
        return float(np.isin(tokens, drafter.vocabulary.cpu().numpy()).mean())
