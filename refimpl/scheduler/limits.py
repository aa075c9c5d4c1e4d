"""What a scheduler refuses at the door: requests that could never run, even alone."""

from __future__ import annotations

from refimpl.cache.kv_cache_manager import KVCacheManager
from refimpl.config import SchedulerConfig
from refimpl.errors import PromptError, QueueFullError
from refimpl.request import Request


def check_length(prompt: int, limit: int, request_id: str) -> None:
    """See that a prompt of so many tokens leaves room for one more under ``max_model_len``, which is ``limit``.

    Raises:
        PromptError: it does not.

    """
    if prompt >= limit:
        raise PromptError(
            f"the prompt has {prompt} tokens; with at least one to generate, at most {limit - 1} fit "
            f"max_model_len = {limit}. Shorten the prompt or raise max_model_len",
            request_id=request_id,
            prompt_tokens=prompt,
            max_model_len=limit,
        )


def check_fits(request: Request, config: SchedulerConfig, kv: KVCacheManager) -> None:
    """See that a request could run if it had everything for itself.

    Raises:
        PromptError: it could not; the message has the arithmetic.

    """
    prompt = len(request.prompt_token_ids)
    check_length(prompt, config.max_model_len, request.request_id)
    needed = kv.blocks_for(prompt + 1)
    if needed > kv.num_blocks:
        raise PromptError(
            f"the prompt of {prompt} tokens and one more need {needed} blocks; the whole cache "
            f"has {kv.num_blocks}. Shorten the prompt or enlarge the cache",
            request_id=request.request_id,
            needed=needed,
            blocks=kv.num_blocks,
        )
    longest, budget = prompt + request.max_tokens - 1, config.max_num_batched_tokens
    if not config.enable_kv_cache and longest > budget:
        raise PromptError(
            f"without a KV cache each step computes the whole context: {prompt} prompt tokens and up to "
            f"{request.max_tokens} more exceed max_num_batched_tokens = {budget}. Raise it, or lower max_tokens",
            request_id=request.request_id,
            context=longest,
            budget=budget,
        )


def check_queue(request: Request, config: SchedulerConfig, num_waiting: int) -> None:
    """See that the queue has room.

    Raises:
        QueueFullError: it has not.

    """
    limit = config.max_num_queued_reqs
    if limit is not None and num_waiting >= limit:
        raise QueueFullError(
            f"{num_waiting} samples wait already, and max_num_queued_reqs is {limit}; try again later, or raise it",
            request_id=request.request_id,
            waiting=num_waiting,
            limit=limit,
        )
