"""``refimpl doctor``: what this machine has, what the engine would do on it and why, and what to do about the rest."""
