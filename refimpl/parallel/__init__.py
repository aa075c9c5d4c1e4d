"""Tensor parallelism: several processes hold one model, driven from the process that made the engine."""
