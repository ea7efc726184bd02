"""A factory's model whose forward cannot take the inputs of a step is reported on the `model` statement."""

from __future__ import annotations

from pathlib import Path

import pytest

from legoai.dsl.lint import lint
from support.models.manifests import inspected_in_this_process

FACTORY = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.case, self.embed, self.head = case, nn.Embedding(256, 16), nn.Linear(16, 256)
        self.wide = nn.Linear(3, 3)

    def forward(self, tokens):
        if self.case == "shape":
            return self.wide(tokens)
        if self.case == "item" and tokens.max().item() > 256:
            raise ValueError
        if self.case == "list":
            tokens.tolist()
        if self.case == "chosen":
            return self.head(self.embed(tokens[tokens > 0]))
        if self.case == "cuda":
            torch.zeros(1, device="cuda")
        if self.case == "library":
            import no_such_kernels
        if self.case == "length":
            assert tokens.shape[1] == 96, "a sequence has 96 tokens"
        if self.case == "window":
            tokens = tokens.view(len(tokens), tokens.shape[1] // 16, 16).flatten(1)
        if self.case == "quarters":
            tokens = torch.cat(tokens.view(4, len(tokens) // 4, -1).unbind())
        if self.case == "values":
            assert tokens.shape[1] > 8, "a sequence has more than 8 tokens"
            tokens.max().item()
        return self.head(self.embed(tokens))


class Long(Net):
    def example_inputs(self):
        return (torch.zeros(1, 96, dtype=torch.int64),)
"""


def found(directory: Path, model: str) -> list[tuple[str, str]]:
    (directory / "net_of_inputs.py").write_text(FACTORY)
    plan = f"plan net\nmodel {model}\ncluster cpu\nbatch (global = 8, micro = 8, seq_len = 128)\n"
    with inspected_in_this_process():
        linted = lint(plan, "net.plan", directory=directory)
    return [(item.code, item.message) for item in linted.diagnostics if item.code.startswith("LP23")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ('python("torch.nn:Linear", in_features = 3, out_features = 3)', "RuntimeError"),
        ('python("net_of_inputs:Net", case = "shape")', "RuntimeError"),
        (
            'python("net_of_inputs:Net", case = "length")',
            "AssertionError: a sequence has 96 tokens (2 samples of 8 and 4 samples of 128 tokens were tried)",
        ),
        ('python("torch.nn:Module")', 'is missing the required "forward" function'),
    ],
)
def test_forward_that_fails_for_the_inputs_of_a_step_is_a_warning(tmp_path: Path, model: str, words: str):
    [(code, message)] = found(tmp_path, model)
    assert code == "LP231"
    assert message.startswith("the model may not take what it is trained on: forward failed on the meta device: ")
    assert words in message


@pytest.mark.parametrize("case", ["none", "item", "list", "chosen", "cuda", "library", "values"])
def test_forward_that_fails_on_the_meta_device_alone_is_not_reported(tmp_path: Path, case: str):
    assert found(tmp_path, f'python("net_of_inputs:Net", case = "{case}")') == []


@pytest.mark.parametrize("case", ["window", "quarters"])
def test_model_that_takes_multiples_of_samples_or_tokens_is_not_reported(tmp_path: Path, case: str):
    assert found(tmp_path, f'python("net_of_inputs:Net", case = "{case}")') == []


def test_a_length_that_forward_takes_is_stated_by_example_inputs(tmp_path: Path):
    assert found(tmp_path, 'python("net_of_inputs:Long", case = "length")') == []
