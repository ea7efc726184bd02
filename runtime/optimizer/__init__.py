"""Optimizers beyond those of torch, groups of parameters, clipping and learning-rate schedules."""
