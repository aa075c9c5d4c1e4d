"""Speculative decoding: tokens that something cheap proposes, and a check after which they are the target's own in law."""
