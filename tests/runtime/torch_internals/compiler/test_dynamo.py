"""A simulation needs no compiler, and leaves torch with the one that it has."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent

import pytest

from support import ROOT

BEGIN = """
import importlib, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from legoai.runtime.torch_internals.compiler.dynamo import without_dynamo

def real():
    found = sys.modules.get("torch._dynamo")
    return found is not None and found.__spec__ is not None

def works():
    "Dynamo compiles, and is kept away from what asks for it."
    calls = []
    def backend(graph, inputs):
        calls.append(graph)
        return graph
    assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2, 2] and len(calls) == 1
    x = torch.ones(3, requires_grad=True)
    checkpoint(lambda t: t * 2, x, use_reentrant=False).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    assert torch._dynamo.config.recompile_limit > 0 and torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
    assert not any(type(item).__module__ == "legoai.runtime.torch_internals.compiler.dynamo" for item in sys.meta_path)
    assert checkpoint.__wrapped__.__dict__.get("__dynamo_disable") is not checkpoint.__wrapped__

def step():
    "What a simulated step asks of it."
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    checkpoint(lambda t: t * 2, weight, use_reentrant=False).sum().backward()
    optimizer.step()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert tuple((torch.ones(2, device="meta") + torch.ones(2, device="meta")).shape) == (2,)
"""

CASES = {
    "asks for nothing else": """
        with without_dynamo():
            step()
            assert not real()
        assert "torch._dynamo" not in sys.modules and "torch._dynamo.config" not in sys.modules
        works()
    """,
    "imports a part of it": """
        with without_dynamo():
            step()
            import torch._dynamo.utils as part
            assert real() and part is sys.modules["torch._dynamo.utils"] and part.__spec__.origin.endswith("utils.py")
            step()
        works()
    """,
    "asks for more of it": """
        with without_dynamo():
            kept = importlib.import_module("torch._dynamo")
            assert not real() and not hasattr(kept, "__no_such_attribute__")
            asked = kept.OptimizedModule
            assert not isinstance(torch.nn.Linear(1, 1), asked) and not real()
            assert callable(kept.reset) and real()
            assert isinstance(torch.compile(torch.nn.Linear(1, 1)), asked) and not isinstance(step, asked)
            assert kept.disable(step) is not step
            kept.graph_break()
        works()
    """,
    "is one of a plan": """
        import contextlib, io
        from legoai.cli import main
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["cost", "plans/tiny.plan"]) == 0
        assert not {"torch._dynamo", "torch._inductor"} & set(sys.modules)
        works()
    """,
    "compiles": """
        with without_dynamo():
            step()
            works()
        works()
    """,
    "fails": """
        try:
            with without_dynamo():
                step()
                raise KeyError
        except KeyError:
            pass
        works()
    """,
    "begins when it is there": """
        import torch._dynamo
        with without_dynamo():
            assert sys.modules["torch._dynamo"] is torch._dynamo and real()
            step()
        works()
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["asks for nothing else", "is one of a plan"])
def test_dynamo_state_is_restored_after_simulation(case):
    _check(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["imports a part of it", "asks for more of it", "compiles", "fails", "begins when it is there"]
)
def test_dynamo_state_is_restored_after_slow_simulation(case):
    _check(case)


def _check(case: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + dedent(CASES[case])],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
