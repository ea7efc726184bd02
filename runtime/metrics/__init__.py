"""Metrics of a run: the log of its steps, TensorBoard, and the profile of one step."""
