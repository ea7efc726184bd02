"""Preservation of the caller's random state."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """On exit, restore the states that Python's, NumPy's and torch's default generators had on entry."""
    of_python, of_numpy, of_torch, seed = random.getstate(), np.random.get_state(), torch.get_rng_state(), None
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    if of_gpus is None:
        seed = torch.initial_seed()
    try:
        yield
    finally:
        if seed is not None:
            torch.cuda.manual_seed_all(seed)  # initial seed of GPUs; another one may be queued
        else:
            assert of_gpus is not None
            torch.cuda.set_rng_state_all(of_gpus)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
