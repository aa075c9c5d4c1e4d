"""The model families, and the random tiny one."""
