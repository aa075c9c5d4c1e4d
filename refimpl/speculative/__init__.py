"""Speculative decoding: several tokens guessed cheaply, and checked by the target in one step (Leviathan et al. 2023)."""
