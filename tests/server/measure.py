"""What the server costs beside the engine alone: ``python tests/server/measure.py [MODEL]``, on a quiet machine.

==============  =============================================================================================
first token     one request at a time: the median of the time to its first token, over that of AsyncLLM
CPU a token     64 streams at once: CPU seconds a token of server and client together, over AsyncLLM's with its reader
idle streams    500 streams of which 4 are answered and the others wait: what the server's memory grows by
==============  =============================================================================================

Each side runs once a turn (``--turns``), first in every other one, since no machine keeps its pace for minutes. Told are the
medians of the sides, and of what the sides of a turn differ by. The engine's own CPU seconds move by hundredths from run to
run, so those of the event loops (the server's and its client's, over that of AsyncLLM's reader) stand beside the whole. A
bound that is missed ends the script with 1.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time

import psutil

from refimpl import AsyncLLM, SamplingParams
from refimpl.bench.openai_stream import OpenAIStream
from refimpl.bench.serve_process import served
from refimpl.bench.sides import same_length
from refimpl.loading.checkpoint import open_checkpoint

LATER, TIMES, GROWTH = 0.010, 1.05, 100e6
"""Seconds of a first token, times the CPU seconds a token, bytes of 500 idle streams."""
STREAMS, IDLE = 64, 500
ENGINE = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": STREAMS, "enable_prefix_caching": False}
FLAGS = ["--dtype", "float32", "--max-model-len", "512", "--no-enable-prefix-caching", "--no-ui"]


def cpu_seconds(processes):
    """Of all threads, and of the main threads, where the event loops run: an engine has threads of its own."""
    whole = loops = 0.0
    for process in processes:
        times = process.cpu_times()
        whole += times.user + times.system
        loops += sum(thread.user_time + thread.system_time for thread in process.threads() if thread.id == process.pid)
    return whole, loops


async def alone(llm, prompt, output):
    """The engine's own: seconds to the first token, and tokens."""
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True, output_kind="delta")
    began, first, tokens = time.perf_counter(), None, 0
    async for update in llm.generate(prompt, params):
        first = first or time.perf_counter() - began
        tokens += len(update.outputs[0].token_ids)
    return first, tokens


async def through(stream, prompt, output):
    """The same through the server."""
    answer = await stream.ask(prompt, output, time.perf_counter())
    assert answer.error is None, answer.message
    return answer.times.to_first_token, answer.times.tokens


async def first_tokens(ask, requests):
    return statistics.median([(await ask(prompt, output))[0] for prompt, output in requests])


async def cpu_a_token(ask, requests, processes):
    before = cpu_seconds(processes)
    counts = await asyncio.gather(*(ask(prompt, output) for prompt, output in requests))
    tokens = sum(tokens for _, tokens in counts)
    return [(now - then) / tokens for now, then in zip(cpu_seconds(processes), before, strict=True)]


async def grown(stream, process, prompt):
    """Bytes that the server grows by while streams wait."""
    before = process.memory_info().rss
    asked = [asyncio.create_task(stream.ask(prompt, 256, time.perf_counter())) for _ in range(IDLE)]
    largest = before
    for _ in range(40):
        await asyncio.sleep(0.25)
        largest = max(largest, process.memory_info().rss)
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    return largest - before


async def pairs(model, turns):
    """Of each turn, alone and through a server: first token, CPU seconds a token, and those of them in event loops."""
    me, found = psutil.Process(), {"alone": [], "server": []}
    with served([model, *FLAGS, "--max-num-seqs", str(STREAMS)]) as url:
        [server] = me.children()
        async with (
            AsyncLLM(model, **ENGINE) as llm,
            OpenAIStream(url, model, body={"ignore_eos": True}) as stream,
        ):
            vocab_size = open_checkpoint(model).config.vocab_size
            one, many = same_length(20, 37, 2, vocab_size), same_length(STREAMS, 37, 64, vocab_size)
            sides = [
                ("alone", lambda *a: alone(llm, *a), [me]),
                ("server", lambda *a: through(stream, *a), [me, server]),
            ]
            for turn in range(turns + 1):
                for name, ask, processes in sides:
                    figures = await first_tokens(ask, one), *await cpu_a_token(ask, many, processes)
                    if turn:  # the first one warms up
                        found[name].append(figures)
                sides.reverse()
    return found


def compared(found):
    """Medians of the sides, and of the differences within a turn."""
    sides = list(zip(found["alone"], found["server"], strict=True))
    times = [server[1] / alone[1] for alone, server in sides]
    return {
        **{name: [statistics.median(one) for one in zip(*rows, strict=True)] for name, rows in found.items()},
        "first_token_later": statistics.median(server[0] - alone[0] for alone, server in sides),
        "cpu_a_token_times": statistics.median(times),
        "cpu_a_token_times_range": [min(times), max(times)],
        "event_loops_times": statistics.median(1 + (server[2] - alone[2]) / alone[1] for alone, server in sides),
    }


async def waiting(model):
    with served([model, *FLAGS, "--max-num-seqs", "4"]) as url:
        [server] = psutil.Process().children()
        async with OpenAIStream(url, model, body={"ignore_eos": True}) as stream:
            await through(stream, [5] * 37, 4)
            return await grown(stream, server, [5] * 37)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    figures = compared(asyncio.run(pairs(options.model, options.turns)))
    figures["idle_bytes"] = asyncio.run(waiting(options.model))
    sys.stdout.write(json.dumps({"model": options.model, **figures}, indent=2) + "\n")
    bounds = {"first_token_later": LATER, "cpu_a_token_times": TIMES, "idle_bytes": GROWTH}
    return any(figures[name] > bound for name, bound in bounds.items())


if __name__ == "__main__":
    sys.exit(main())
