"""From options to a scheduler."""

from __future__ import annotations

from collections.abc import Callable

from refimpl.cache.kv_cache_manager import KVCacheManager
from refimpl.config import EngineArgs, SchedulerConfig
from refimpl.scheduler.drafting import Drafting
from refimpl.scheduler.policies import Policy
from refimpl.scheduler.preemption import PreemptionCosts
from refimpl.scheduler.scheduler import Scheduler
from refimpl.scheduler.static import StaticScheduler
from refimpl.scheduler.stopping import TextWatch


def make_scheduler(
    args: EngineArgs,
    config: SchedulerConfig,
    kv_cache_manager: KVCacheManager,
    eos_token_ids: tuple[int, ...],
    clock: Callable[[], float],
    policy: Policy,
    text: TextWatch | None = None,
    costs: PreemptionCosts | None = None,
    drafting: Drafting | None = None,
) -> Scheduler:
    """The continuous scheduler, or the static baseline.

    ``clock`` counts seconds; ``text`` finds stop strings; ``costs`` are for ``preemption_mode="auto"``; ``drafting``
    says how many tokens are drafted.
    """
    parts = (config, kv_cache_manager, eos_token_ids, clock, policy, text, costs, drafting)
    if args.scheduler == "static":
        return StaticScheduler(*parts, drop_finished=args.static_drop_finished)
    return Scheduler(*parts)
