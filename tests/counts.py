"""What the proofs counted in this run, and the line that tells it."""

from collections import Counter

COUNTS = Counter()


def summary():
    """One line, of the proofs that ran; None if none did."""
    calls, audits, planted, same = (COUNTS[name] for name in ("calls", "audits", "planted", "same_tokens"))
    proof = f"proof: {calls:,} calls, {audits:,} audits at three levels, {planted} planted faults seen"
    identity = f"identity: {same:,} cases of equal tokens"
    return "; ".join(part for part, ran in ((proof, calls), (identity, same)) if ran) or None
