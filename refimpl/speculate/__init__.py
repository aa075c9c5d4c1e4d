"""What ``refimpl speculate`` runs: drafters are trained, and speculation is measured, for a target of one's own."""
