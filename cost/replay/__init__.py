"""Replay of repetition within a step: equal blocks of the model, and equal micro batches."""
