"""Benchmarks: each topic prints one JSON object with its setting, its figures, and the checks that the README states."""
