"""The scheduler: which sequences compute how many tokens in the next step. Pure Python, no torch."""

from refimpl.scheduler.plan import StepUpdate
from refimpl.scheduler.request_queue import RequestQueue
from refimpl.scheduler.scheduler import Scheduler

__all__ = ["RequestQueue", "Scheduler", "StepUpdate"]
