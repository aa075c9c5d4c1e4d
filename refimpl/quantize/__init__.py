"""Writing quantised checkpoints: AWQ in 4 bits and FP8, and what they cost in perplexity."""
