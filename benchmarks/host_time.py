"""Host time of kernels that modules, autograd and Python functions issue: `python -m benchmarks.host_time`.

The tensors are so small that only the host's work takes time, on one thread of this machine's processor. Timed is the
process's processor time, the minimum of many repetitions. `forward` is the forward pass of modules without autograd's
records, as in the profiles' figure for kernels that Python issues; `nodes` is a backward pass that C++ issues,
`functions` the same backward in Python autograd functions. Kernels are counted as in the simulator. The launch on a GPU
is not included.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.machine import ask, write_rows
from benchmarks.validation import megatron_models
from torch import nn

from legoai.cost.simulated.operators import operator
from legoai.runtime.torch_internals.operators import TorchDispatchMode
from legoai.specs.models.families import resolve_config
from legoai.specs.models.gpt import GPT
from legoai.specs.models.llama import Llama

RESULTS = Path(__file__).parent / "results" / "host_time.json"
DEPTH, TIMES = 50, 60
SIZES = {"dim": 16, "n_layers": 8, "n_heads": 4, "hidden_dim": 32, "vocab_size": 16, "max_seq_len": 8}


class _Kernels(TorchDispatchMode):
    """Counts kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator(func).treatment in ("kernel", "copy")
        return func(*args, **(kwargs or {}))


class _Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the Python function of Megatron."""
        return megatron_models._Gelu.apply(x)  # type: ignore[no-any-return]


def _cases() -> Iterator[tuple[str, nn.Module, nn.Module | None, torch.Tensor]]:
    """Name, model, the same model of Python functions, and its input."""
    x = torch.ones(1, 16, requires_grad=True)

    def chain(make: Callable[[], nn.Module]) -> nn.Module:
        return nn.Sequential(*(make() for _ in range(DEPTH)))

    yield "layer norm", chain(lambda: nn.LayerNorm(16)), chain(lambda: megatron_models.Norm(16)), x
    yield "gelu", chain(lambda: nn.GELU(approximate="tanh")), chain(_Gelu), x
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    yield "GPT", GPT(resolve_config("gpt3", "1.3b", SIZES)), None, tokens  # type: ignore[arg-type]
    sizes = {**SIZES, "n_kv_heads": 4}
    yield "Llama", Llama(resolve_config("llama3", "8b", sizes)), None, tokens  # type: ignore[arg-type]


def _forward(model: nn.Module, x: torch.Tensor) -> float:
    def once() -> float:
        begin = time.process_time()
        model(x)
        return time.process_time() - begin

    with torch.no_grad():
        with _Kernels() as kernels:
            model(x)
        return min(once() for _ in range(TIMES)) / kernels.count


def _backward(model: nn.Module, x: torch.Tensor) -> float:
    def once() -> float:
        for parameter in model.parameters():
            parameter.grad = None
        out = model(x).sum()
        begin = time.process_time()
        out.backward()
        return time.process_time() - begin

    once()
    out = model(x).sum()
    for parameter in model.parameters():
        parameter.grad = None
    with _Kernels() as kernels:
        out.backward()
    return min(once() for _ in range(TIMES)) / kernels.count


def main(arguments: Sequence[str] | None = None) -> int:
    asked = ask(__doc__, RESULTS)
    torch.set_num_threads(1)
    gc.disable()
    rows = []
    print(f"{'':12}{'forward':>10}{'nodes':>10}{'functions':>10}  us per kernel")
    for name, model, functions, x in _cases():
        seconds = [_forward(model, x), _backward(model, x), _backward(functions, x) if functions is not None else None]
        rows.append({"model": name, **dict(zip(("forward", "nodes", "functions"), seconds, strict=True))})
        print(f"{name:12}" + "".join(f"{'' if one is None else f'{one * 1e6:.2f}':>10}" for one in seconds))
    if asked.options.write:
        write_rows(RESULTS, asked.about, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
