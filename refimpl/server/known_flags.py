"""Flags that stand in articles about vLLM, and what became of them here: said in the log, once, at the start."""

from __future__ import annotations

from refimpl.config import EngineArgs

MOST_QUEUED = 4096
"""``max_num_queued_reqs`` of a server that was given none: a queue without an end is memory without an end."""


def notes(args: EngineArgs, use_v2_block_manager: bool) -> list[str]:
    """What is worth knowing of the options that were given."""
    found = []
    if use_v2_block_manager:
        found.append(
            "--use-v2-block-manager changes nothing: the one block manager (--kv-cache-manager paged) has copy-on-write, "
            "look-ahead for drafts and shared prefixes"
        )
    if (spec := args.speculative_config) is not None:
        model = "" if spec.model is None else f", model {spec.model}"
        found.append(
            f"speculation: method {spec.method}{model}, up to {spec.num_speculative_tokens} drafts a round"
            f"{' (fewer where fewer pay)' if spec.adaptive else ''}; --speculative-config says it in one flag"
        )
    if args.swap_space:
        found.append(f"--swap-space {args.swap_space:g}: GiB of host memory a device, used when a sequence is preempted")
    if args.max_num_queued_reqs is not None:
        found.append(f"requests are refused (503) while {args.max_num_queued_reqs:,} samples wait (--max-num-queued-reqs)")
    return found
