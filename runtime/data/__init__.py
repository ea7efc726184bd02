"""Data of a run: texts as tokens, the samples of a training, and each rank's part of them."""
