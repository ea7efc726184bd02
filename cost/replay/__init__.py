"""Replay of what a step repeats: equal blocks of the model, and equal micro batches."""
