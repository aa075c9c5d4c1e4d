"""A process in which one engine after the other is measured, and its side that asks.

GPU memory comes back when it ends, and whatever it fails of loses its own rows alone. It is rank 0 of its engines, which
start the other ranks.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import statistics
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from refimpl.bench.offline import requests_of, within_vocabulary
from refimpl.bench.rounds import Answered, answer
from refimpl.bench.rows import DoesNotFit, Figures
from refimpl.bench.scaling_plan import Machine
from refimpl.bench.sides import Requests, Run, in_turn, prompt, serve
from refimpl.bench.speculation import Chance, drafting
from refimpl.bench.subject import model_or_shape
from refimpl.config import EngineArgs, ModelConfig
from refimpl.engine import Engine
from refimpl.executor.device import resolve_device, resolve_dtype
from refimpl.model_shares import share_of
from refimpl.models.tiny import tiny

ACCEPTANCE = 0.75
"""Of each draft, by chance."""
WARM_UP_TOKENS, MOST_WARM_UP = 8, 64
"""Output tokens of the requests that run before a row, and so many of them at most."""
SHRUNKEN = {"vocab_size": 556, "hidden_size": 256, "num_hidden_layers": 4, "head_dim": 16}
SHRUNKEN_PROMPTS, SHRUNKEN_OUTPUT = (5, 33, 64, 100), 24
CLOSING = 60.0
"""Seconds that an engine may take to close."""


@dataclass(frozen=True)
class _Failed:
    why: str


class MeasuringProcess:
    """Asks a fresh Python; every method of :class:`_Measuring` is a question."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._ended: str | None = None
        self._busy = False

    def ask(self, what: str, *arguments: Any, seconds: float = math.inf) -> Any:
        """Order something and wait for it.

        Raises:
            DoesNotFit: it failed, or took longer than ``seconds``; the reason is told.

        """
        self.order(what, *arguments)
        return self.answer(seconds)

    def order(self, what: str, *arguments: Any) -> None:
        """Have it begin; :meth:`answer` waits for it."""
        if self._ended is not None:
            raise DoesNotFit(self._ended)
        self._busy = True
        with suppress(OSError):  # it has ended: waiting says how
            self._pipe.send((what, arguments))

    def answer(self, seconds: float = math.inf) -> Any:
        """Wait for what was ordered; raises as :meth:`ask`."""
        try:
            if not self._pipe.poll(None if math.isinf(seconds) else max(0.0, seconds)):
                self._end(f"it took longer than the {seconds:.0f} seconds that were left")
            told = self._pipe.recv()
            self._busy = False
        except (EOFError, OSError):
            self._process.join()
            self._end(f"its process ended with code {self._process.exitcode}: see above")
        if isinstance(told, _Failed):
            raise DoesNotFit(told.why)
        return told

    def _end(self, why: str) -> NoReturn:
        self._ended = why
        self.close()
        raise DoesNotFit(why)

    def close(self) -> None:
        """Let it close its engine, and end it; in the midst of an order it is ended at once. May be called twice."""
        self._pipe.close()
        self._process.join(0.0 if self._busy else CLOSING)
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection) -> None:
    """Answer until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks takes Ctrl-C, and ends this process
    os.dup2(2, 1)  # the result's JSON has stdout to itself
    measuring = _Measuring()
    try:
        while True:
            what, arguments = pipe.recv()
            try:
                told = getattr(measuring, what)(*arguments)
            except Exception as error:  # whatever it is, other rows are wanted
                traceback.print_exc()
                told = _Failed(f"{type(error).__name__}: {error}")
            pipe.send(told)
    except (EOFError, OSError):
        measuring.close()


class _Measuring:
    """What the process can be asked."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def look(self) -> Machine:
        """What there is to measure on."""
        if not torch.cuda.is_available():
            return Machine("cpu", 0, 0, _read_by_cpu())
        from refimpl.bench.kernels import measure_ceilings  # needs triton

        of_first = torch.cuda.get_device_properties(0)
        ceilings = measure_ceilings(torch.device("cuda", 0), repeats=10)
        return Machine(of_first.name, torch.cuda.device_count(), of_first.total_memory, ceilings["read_bytes_per_second"])

    def tokens(self, model: ModelConfig, device: str, ranks: int) -> list[list[int]]:
        """Greedy tokens of a small random model with the heads of ``model``."""
        heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
        sizes = SHRUNKEN | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": 12 * heads}
        dtype = "float32" if resolve_device(device).type == "cuda" else "float64"
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 256, "num_gpu_blocks_override": 64}
        own = {"model": tiny(**sizes), "dtype": dtype, "device": device, "tensor_parallel_size": ranks}
        engine = Engine(EngineArgs.from_options(options | own))
        try:
            requests = [(prompt(n, n, SHRUNKEN["vocab_size"]), SHRUNKEN_OUTPUT) for n in SHRUNKEN_PROMPTS]
            return serve(engine, requests, detokenize=False).token_ids
        finally:
            engine.close()

    def open(self, options: dict[str, Any], model_config: str, draft: str | None) -> Figures:
        """Start an engine with random weights, with a draft model of a shape or without; the one before is closed."""
        self.close()
        options, _ = model_or_shape(options, model_config)
        args = EngineArgs.from_options(options | ({} if draft is None else drafting(draft, Chance(ACCEPTANCE))))
        began = time.perf_counter()
        self._engine = engine = Engine(args)
        share = share_of(engine.model_config, args.tensor_parallel_size)
        itemsize = resolve_dtype(args.dtype, resolve_device(args.device)).itemsize
        unread = 0 if share.tie_word_embeddings else share.vocab_size * share.hidden_size * itemsize
        executor = engine.executor
        return {
            "start_seconds": time.perf_counter() - began,
            "num_blocks": executor.num_blocks,
            # A step reads one row of the embeddings a token, and everything else.
            "read_bytes": executor.weight_bytes - unread,
        }

    def measure(self, workload: str, scale: float, repeats: int, seconds: float) -> Figures:
        """Figures of a workload, answered ``repeats`` times, or as often as there are seconds for."""
        assert self._engine is not None
        until, engine = time.perf_counter() + seconds, self._engine
        requests = within_vocabulary(requests_of(workload, scale), engine.model_config.vocab_size)
        length = engine.scheduler.drafting.length
        temperature = 0.0 if length is None else 1.0
        some = requests[: min(MOST_WARM_UP, math.ceil(len(requests) / 4))]
        serve(engine, [(ids, min(output, WARM_UP_TOKENS)) for ids, output in some], False, temperature)
        found: list[Answered] = []

        def once() -> Run:
            found.append(answer(engine, requests, len(requests), length, temperature))
            return found[-1].runs[0]

        in_turn({workload: once}, repeats, until, discarded=0)
        return summary(requests, found)

    def close(self) -> None:
        """Close the engine, if there is one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def summary(requests: Requests, found: list[Answered]) -> Figures:
    """Rates and times of a workload that was answered some times, all requests being there at the beginning.

    ``itl_p50`` is the median time of a step over the tokens that a sequence gets of it: 1, and more where drafts are
    accepted. A user's tokens a second are told by it, and as the rate of all over how many there are.
    """
    runs = [one.runs[0] for one in found]
    tokens = sum(output for _, output in requests)
    assert all(sum(map(len, run.token_ids)) == tokens for run in runs), "without an end"
    rate = tokens / statistics.median(run.total for run in runs)
    step = statistics.median([gap for run in runs for gap in run.steps] or [runs[0].total])
    counted = [one.counted for one in found if one.counted is not None]
    a_step = sum(one.tokens for one in found) / sum(one.rows for one in counted) if counted else 1.0
    figures: Figures = {
        "requests": len(requests),
        "prompt_tokens": sum(len(ids) for ids, _ in requests),
        "output_tokens": tokens,
        "seconds": [run.total for run in runs],
        "output_tokens_per_second": rate,
        "step_p50": step,
        "itl_p50": step / a_step,
        "user_tokens_per_second": {"by_itl": a_step / step, "by_rate": rate / len(requests)},
    }
    return figures | ({"tokens_a_step": a_step, "synthetic_acceptance": ACCEPTANCE} if counted else {})


def _read_by_cpu() -> float:
    """Bytes a second: the best of a few sums over much memory."""
    source = torch.ones(2**26)
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        source.sum()
        taken.append(time.perf_counter() - began)
    return source.nbytes / min(taken)
