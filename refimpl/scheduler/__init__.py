"""The scheduler: which sequences compute how many tokens in the next step. Pure Python, no torch."""

from refimpl.scheduler.request_queue import RequestQueue
from refimpl.scheduler.scheduler import Scheduler, StepUpdate

__all__ = ["RequestQueue", "Scheduler", "StepUpdate"]
