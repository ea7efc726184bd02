"""Training in tests: pools of ranks, programs, corpora, checkpoints, and what a real step calls and holds."""
