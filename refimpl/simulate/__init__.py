"""The simulator: the real scheduler and cache on hardware that is not there.

>>> from refimpl.config import EngineArgs
>>> from refimpl.simulate import Deployment, Simulation, mixed
>>> deployment = Deployment.of("llama-3-70b", "h200", tensor_parallel_size=2)
>>> simulation = Simulation(EngineArgs(enable_prefix_caching=False), deployment, mixed("chat", 100, seed=0))
>>> simulation.run()["throughput"]
"""

from refimpl.simulate.deployment import Deployment
from refimpl.simulate.executor import SimulatedExecutor, VirtualClock
from refimpl.simulate.hardware import HARDWARE, Hardware
from refimpl.simulate.models import MODELS
from refimpl.simulate.roofline import Efficiency, Roofline, StepTimes, StepWork
from refimpl.simulate.run import Simulation
from refimpl.simulate.tally import RequestLatency
from refimpl.simulate.workload import TraceRequest, arrive, mixed

__all__ = [
    "HARDWARE",
    "MODELS",
    "Deployment",
    "Efficiency",
    "Hardware",
    "RequestLatency",
    "Roofline",
    "SimulatedExecutor",
    "Simulation",
    "StepTimes",
    "StepWork",
    "TraceRequest",
    "VirtualClock",
    "arrive",
    "mixed",
]
