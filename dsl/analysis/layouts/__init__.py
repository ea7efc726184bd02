"""Layouts on `tp`: abstract tensors, and their propagation through a model's forward."""
