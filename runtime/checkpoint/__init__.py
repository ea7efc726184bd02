"""Checkpoints of a run: their tensors and metadata, the folder of one run, and writing beside the training."""
