"""The long proof: millions of random calls of the scheduler and the cache, with all three levels of audit after each.

    python tests/scheduler/prove.py --steps 1000000 [--seed N] [--walk W]

A walk makes one engine state at random and 50 to 200 calls, then steps until nothing is left. The seed and the walk's number
say all of it, so a walk that fails can be repeated alone; its event log is saved in the current folder.
"""
# ruff: noqa: T201, a command prints

import argparse
import contextlib
import random
import sys
import traceback
from collections import Counter
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sharing_support import Driver

from refimpl.errors import RequestError
from refimpl.request import Request, Sequence

CALLS = {"add": 4, "fork": 2, "abort": 1, "preempt": 1, "reset": 0.3, "step": 8}
"""How often each is called, against the others."""

SEEN = (
    "calls",
    "audits",
    "walks",
    "copies",
    "prefix_hits",
    "evictions",
    "preempted",
    "swapped_out",
    "forks",
    "aborted",
    "drafted",
    "accepted",
)
"""What is counted, in the order in which it is told."""


class WalkError(Exception):
    """A walk broke a law. Its cause is the violation."""

    def __init__(self, seed, number, call, driver):
        super().__init__(f"seed {seed}, walk {number}, call {driver.num_calls}, step {driver.scheduler.step}: {call}")
        self.seed, self.number, self.call, self.driver = seed, number, call, driver

    def save(self, folder="."):
        """The walk's event log, which the widgets can replay; returns its path."""
        path = Path(folder) / f"failed-walk-{self.seed}-{self.number}.jsonl"
        self.driver.save_trace(path, f"{self}: {self.__cause__!r}")
        return path


def random_driver(rng):
    """A tiny pool, all options drawn."""
    num_blocks, block_size = rng.randint(3, 14), rng.randint(1, 5)
    length = max(2, num_blocks * block_size // rng.choice([1, 1, 1, 2, 3]))
    chunked = rng.random() < 0.8
    options = {
        "enable_kv_cache": rng.random() < 0.9,
        "enable_chunked_prefill": chunked,
        "max_num_seqs": rng.randint(1, 5),
        "max_model_len": length,
        "max_num_batched_tokens": rng.randint(5, 20) if chunked else max(5, length),
        "long_prefill_token_threshold": rng.choice([0, 0, 1, 2, 5]),
        "max_num_queued_reqs": rng.choice([None, None, 3, 8]),
        "scheduling_policy": rng.choice(["fcfs", "priority", "shortest_prompt_first", "fair_share_by_user"]),
        "watermark": rng.choice([0, 0, 0.1, 0.4]),
    }
    if rng.random() < 0.1:
        options["kv_cache_manager"] = "contiguous"
    else:
        options["block_allocator"] = rng.choice(["first_freed_first", "lowest_first"])
        options["prefix_index"] = rng.choice(["chained_hash", "token_tree"])
    if rng.random() < 0.1:
        options |= {"scheduler": "static", "static_drop_finished": rng.random() < 0.5}
    if options["enable_kv_cache"] and "kv_cache_manager" not in options and rng.random() < 0.5:
        mode = rng.choice(["swap", "swap", "auto"])
        options |= {"num_host_blocks": rng.randint(1, 12), "swap_space": 1.0, "preemption_mode": mode}
    if options["enable_kv_cache"] and "scheduler" not in options and rng.random() < 0.5:
        options["drafts"] = rng.randint(1, 6)
    return Driver(num_blocks, block_size, depth=rng.randint(0, 1), prefix_cache=rng.random() < 0.7, **options)


def random_call(rng, driver):
    """(name of a Driver's method, its arguments)."""
    name = rng.choices(list(CALLS), CALLS.values())[0]
    alive = list(driver.scheduler.sequences.values())
    if name == "add":
        prompt = [3] * rng.randint(0, 9) + rng.choices([1, 2], k=rng.randint(0, 3)) or [4]
        room = driver.scheduler.config.max_model_len - len(prompt)
        return name, {
            "prompt": prompt,
            "max_tokens": max(1, min(rng.randint(1, 9), room)),
            "n": rng.randint(1, 3),
            "salt": rng.choice([None, None, "x"]),
            "priority": rng.randint(0, 2),
            "user": rng.choice("ab"),
        }
    if name in ("step", "reset") or not alive:
        return ("reset" if name == "reset" else "step"), {}
    sequence = rng.choice(alive)
    if name == "fork":
        return name, {"parent": sequence, "max_tokens": rng.randint(1, 6)}
    if name == "preempt":
        return name, {"request": sequence.request, "mode": rng.choice(["swap", "recompute"])}
    return name, {"request": sequence.request}


def in_words(name, arguments):
    """A call as it would be written."""

    def text(value):
        if isinstance(value, Sequence):
            return f"<sequence {value.sequence_id}>"
        return f"<request {value.request_id}>" if isinstance(value, Request) else repr(value)

    return f"{name}({', '.join(f'{key}={text(value)}' for key, value in arguments.items())})"


def walk(seed, number):
    """One walk; returns its driver.

    Raises:
        WalkError: whatever went wrong is its cause.

    """
    rng = random.Random(f"{seed} {number}")
    driver, call = random_driver(rng), ("run", {})
    try:
        for _ in range(rng.randint(50, 200)):
            call = random_call(rng, driver)
            with contextlib.suppress(RequestError):  # the prompt does not fit, or the queue is full
                getattr(driver, call[0])(**call[1])
        call = ("run", {})
        driver.run()
    except Exception as error:
        raise WalkError(seed, number, in_words(*call), driver) from error
    return driver


def seen_in(driver):
    """What happened in a walk, counted."""
    seen = Counter(walks=1, calls=driver.num_calls, audits=driver.num_audits)
    for output in driver.outputs:
        for what in ("copies", "prefix_hits", "preempted", "swapped_out", "forks", "aborted"):
            seen[what] += len(getattr(output, what))
    seen["drafted"] = sum(num_drafts for num_drafts, _ in driver.drafts.seen)
    seen["accepted"] = sum(num_accepted for _, num_accepted in driver.drafts.seen)
    seen["evictions"] = driver.cache.stats.evictions if driver.cache else 0
    return seen


def prove(seed, steps, progress=lambda calls: None):
    """Walk after walk, until there were ``steps`` calls; returns what was seen, counted.

    Raises:
        WalkError: a walk broke a law.

    """
    seen = Counter()
    while seen["calls"] < steps:
        driver = walk(seed, seen["walks"])
        seen += seen_in(driver)
        progress(driver.num_calls)
    return seen


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Random calls of scheduler and cache, audited at three levels after each.")
    parser.add_argument("--steps", type=int, default=1_000_000, help="calls in all (default: a million)")
    parser.add_argument("--seed", type=int, default=None, help="of the whole run (default: a random one)")
    parser.add_argument("--walk", type=int, default=None, help="repeat this walk alone")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    try:
        if options.walk is not None:
            seen = seen_in(walk(seed, options.walk))
        else:
            with tqdm(total=options.steps, unit=" calls", unit_scale=True) as bar:
                seen = prove(seed, options.steps, bar.update)
    except WalkError as failure:
        traceback.print_exception(failure.__cause__)
        print(f"FAILED: {failure}")
        print(f"event log: {failure.save()}")
        print(f"repeat: python tests/scheduler/prove.py --seed {seed} --walk {failure.number}")
        return 1
    print("clean: " + ", ".join(f"{seen[what]:,} {what.replace('_', ' ')}" for what in SEEN))
    return 0


if __name__ == "__main__":
    sys.exit(main())
