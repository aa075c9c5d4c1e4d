"""Executors: whoever turns a SchedulerOutput into tokens."""
