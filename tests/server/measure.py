"""What the server costs beside the engine alone: ``python tests/server/measure.py [MODEL]``, on a quiet machine.

==============  =============================================================================================
first token     one request at a time: the median of the time to its first token, over that of AsyncLLM
CPU a token     64 streams at once: CPU seconds a token of server and client together, over AsyncLLM's with its reader
idle streams    500 streams of which 4 are answered and the others wait: what the server's memory grows by
==============  =============================================================================================

Each pair runs in turn (``--turns``), and its median is told. A bound that is missed ends the script with 1.
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


def cpu_seconds(process):
    times = process.cpu_times()
    return times.user + times.system


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
    before = sum(map(cpu_seconds, processes))
    counts = await asyncio.gather(*(ask(prompt, output) for prompt, output in requests))
    return (sum(map(cpu_seconds, processes)) - before) / sum(tokens for _, tokens in counts)


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
    """First tokens and CPU seconds a token, alone and through a server, in turn."""
    me, found = psutil.Process(), {"alone": [], "server": []}
    with served([model, *FLAGS, "--max-num-seqs", str(STREAMS)]) as url:
        [server] = me.children()
        async with (
            AsyncLLM(model, **ENGINE) as llm,
            OpenAIStream(url, model, body={"ignore_eos": True}) as stream,
        ):
            vocab_size = open_checkpoint(model).config.vocab_size
            one, many = same_length(20, 37, 2, vocab_size), same_length(STREAMS, 37, 64, vocab_size)
            for turn in range(turns + 1):
                for name, ask, processes in (
                    ("alone", lambda *a: alone(llm, *a), [me]),
                    ("server", lambda *a: through(stream, *a), [me, server]),
                ):
                    figures = await first_tokens(ask, one), await cpu_a_token(ask, many, processes)
                    if turn:  # the first one warms up
                        found[name].append(figures)
    return {name: [statistics.median(one) for one in zip(*rows, strict=True)] for name, rows in found.items()}


async def waiting(model):
    with served([model, *FLAGS, "--max-num-seqs", "4"]) as url:
        [server] = psutil.Process().children()
        async with OpenAIStream(url, model, body={"ignore_eos": True}) as stream:
            await through(stream, [5] * 37, 4)
            return await grown(stream, server, [5] * 37)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    found = asyncio.run(pairs(options.model, options.turns))
    later = found["server"][0] - found["alone"][0]
    times = found["server"][1] / found["alone"][1]
    grows = asyncio.run(waiting(options.model))
    figures = {"model": options.model, **found, "first_token_later": later, "cpu_a_token_times": times, "idle_bytes": grows}
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    return later > LATER or times > TIMES or grows > GROWTH


if __name__ == "__main__":
    sys.exit(main())
