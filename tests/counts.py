"""What the proofs counted in this run, and the line that tells it."""

from collections import Counter

COUNTS = Counter()
SAID = []
"""Further lines: what a run drew at random, and must be known to repeat it."""


def summary():
    """A line of the proofs that ran, and what else was said; None if there is nothing."""
    calls, audits, planted, same = (COUNTS[name] for name in ("calls", "audits", "planted", "same_tokens"))
    proof = f"proof: {calls:,} calls, {audits:,} audits at three levels, {planted} planted faults seen"
    identity = f"identity: {same:,} cases of equal tokens"
    ran = "; ".join(part for part, ran in ((proof, calls), (identity, same)) if ran)
    return "\n".join(filter(None, [ran, *SAID])) or None
