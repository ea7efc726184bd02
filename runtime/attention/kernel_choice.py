"""Choice of the attention kernel of a run."""

from __future__ import annotations

import contextlib

from torch.nn.attention import SDPBackend, sdpa_kernel


def attention_kernel(backend: SDPBackend | None) -> contextlib.AbstractContextManager[None]:
    """Return the context in which every scaled dot-product attention uses one kernel; None leaves it to PyTorch.

    Enter it around forward and backward: recomputation calls the kernel in backward.
    """
    return contextlib.nullcontext() if backend is None else sdpa_kernel(backend)
