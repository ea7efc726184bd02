"""Host time of kernels by what issues them, and of checkpoints: `python -m benchmarks.host_time`.

The tensors are so small that only the host's work takes time, on one thread of this machine's processor. Timed is the
process's processor time, the minimum of many repetitions. `decoding` is the forward pass of modules without autograd's
records, as in the published run from which the profiles have the host time of a kernel; `forward` is the same pass with
records, as in training; `nodes` is a backward pass that C++ issues, `functions` the same backward in Python autograd
functions. Kernels are counted as in the simulator. The launch on a GPU is not included.

`hooks` is what checkpoints of all blocks add to a step beyond the kernels that run again, for each of these and
relative to `forward`: the median of rounds that measure both, since a processor's speed may change.

`policy` is a kernel that a policy of selective checkpointing sees, relative to `forward`: in forward, and where it runs
again, with the hooks. On the host of an H100 a step of eight small blocks under one took 221 to 232 ms; 94 were
predicted without these, 264 with them.

`calls` are those that issue nothing themselves, as `legoai calibrate` measures them, relative to the decoding of the
Llama. `host_steps.py` compares whole steps with what these figures add up to.

The profiles scale the published host time, less that of a launch, by what is printed (`fit_figures.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.machine import ask
from benchmarks.validation import megatron_models
from torch import nn

from legoai.cost.calibration.calls import CallTimer
from legoai.cost.calibration.host import SMALL, HostTimer, chain
from legoai.cost.trace.garbage import uncollected
from legoai.specs.models.families import resolve_config
from legoai.specs.models.gpt import GPT
from legoai.specs.models.llama import Llama

RESULTS = Path(__file__).parent / "results" / "host_time.json"
COLUMNS = ("decoding", "forward", "nodes", "functions")
ROUNDS = 9


class _Gelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the Python function of Megatron."""
        return megatron_models._Gelu.apply(x)  # type: ignore[no-any-return]


def _cases() -> Iterator[tuple[str, nn.Module, nn.Module | None, torch.Tensor]]:
    """Name, model, the same model of Python functions, and its input."""
    x = torch.ones(1, 16, requires_grad=True)
    yield "layer norm", chain(lambda: nn.LayerNorm(16)), chain(lambda: megatron_models.Norm(16)), x
    yield "gelu", chain(lambda: nn.GELU(approximate="tanh")), chain(_Gelu), x
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    yield "GPT", GPT(resolve_config("gpt3", "1.3b", SMALL)), None, tokens  # type: ignore[arg-type]
    sizes = {**SMALL, "n_kv_heads": 4}
    yield "Llama", Llama(resolve_config("llama3", "8b", sizes)), None, tokens  # type: ignore[arg-type]


def _hooks(timer: HostTimer, model: nn.Module, x: torch.Tensor) -> float:
    """Time of checkpoint hooks for a kernel that runs again, over that of a kernel in forward."""
    rounds = [(timer.forward(model, x), timer.recomputation(model, x)) for _ in range(ROUNDS)]
    return statistics.median(again / forward - 1 for forward, again in rounds)


def _policy(timer: HostTimer, model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Time of a kernel under a policy of selective checkpointing over that of one in forward: once, and again."""
    rounds = [(timer.forward(model, x), *timer.under_policy(model, x)) for _ in range(ROUNDS)]
    return (
        statistics.median(once / forward for forward, once, _ in rounds),
        statistics.median(again / forward for forward, _, again in rounds),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    asked = ask(__doc__, RESULTS)
    torch.set_num_threads(1)
    timer = HostTimer(clock=time.process_time)
    rows: list[dict[str, Any]] = []
    print(f"{'':12}" + "".join(f"{name:>10}" for name in COLUMNS) + "  us per kernel")
    with uncollected():
        for name, model, functions, x in _cases():
            seconds = [
                timer.forward(model, x, records=False),
                timer.forward(model, x),
                timer.backward(model, x),
                None if functions is None else timer.backward(functions, x),
            ]
            hooks = None if functions is not None else _hooks(timer, model, x)
            policy = None if functions is not None else _policy(timer, model, x)
            rows.append({"model": name, **dict(zip(COLUMNS, seconds, strict=True)), "hooks": hooks, "policy": policy})
            print(f"{name:12}" + "".join(f"{'' if one is None else f'{one * 1e6:.2f}':>10}" for one in seconds))
    chains, whole = rows[:2], rows[2:]
    for name, of in (("forward", whole), ("nodes", whole), ("functions", chains)):
        print(f"{name} relative to decoding: {statistics.fmean(row[name] / row['decoding'] for row in of):.2f}")
    least = whole[-1]
    print(f"calls, relative to decoding of {least['model']}:")
    with uncollected():
        seconds = CallTimer(timer, "cpu", least["forward"]).seconds()
    for call, each in seconds.items():
        print(f"  {call}: {each * 1e6:.1f} us, {each / least['decoding']:.2f}")
        rows.append({"call": call, "seconds": each, "by_decoding": each / least["decoding"]})
    for row in whole:
        print(f"hooks of checkpoints in {row['model']}, relative to forward: {row['hooks']:.1f}")
        once, again = row["policy"]
        print(f"kernels under a policy in {row['model']}, relative to forward: {once:.1f}, again {again:.1f}")
    asked.save(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
