"""Stages keep the names of the whole model, and an order of actions runs as it is written."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from legoai.runtime.parallelism.pipeline import Pipeline, StagedModel, StagesOfRank, keep_modules, ordered_schedule

WIDTH = 4
BLOCKS = 4


class Chain(nn.Module):
    """Linear blocks between two other layers, as a stage without the modules of other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleDict({str(i): nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for i in range(BLOCKS)})
        self.back = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
        x = x if self.front is None else self.front(x)
        for block in self.blocks.values():
            x = x + torch.tanh(block(x)) * (1 if factor is None else factor)
        return x if self.back is None else self.back(x)


class OwnInput(torch.autograd.Function):
    """Returns its input, which torch makes a view, as a function does that adds a loss in backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


RESULTS = {
    "view": lambda x: x.flatten().view(-1, WIDTH),
    "slice": lambda x: torch.cat((x, x))[: len(x)],
    "own input": OwnInput.apply,
}


class ChainOfViews(Chain):
    """The same, whose stages return views."""

    result = ""

    def forward(self, x: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
        return RESULTS[self.result](super().forward(x, factor))


STAGES = (("front", "blocks.0"), ("blocks.1",), ("blocks.2",), ("blocks.3", "back"))


def chain(stage: int | None = None, result: str | None = None) -> Chain:
    torch.manual_seed(0)
    model = Chain() if result is None else ChainOfViews()
    model.result = result
    if stage is not None:
        keep_modules(model, STAGES[stage])
    return model


def test_stage_holds_its_modules_under_model_names():
    whole = {name for name, _ in chain().named_parameters()}
    held = [{name for name, _ in chain(index).named_parameters()} for index in range(4)]
    assert held[1] == {"blocks.1.weight", "blocks.1.bias"}
    assert set.union(*held) == whole
    assert sum(map(len, held)) == len(whole)


def test_stages_in_sequence_equal_the_model():
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    through = x
    for index in range(4):
        through = chain(index)(through)
    assert torch.equal(through, chain()(x))


def test_module_lists_keep_the_names_of_remaining_modules():
    model = nn.ModuleDict({"inner": nn.ModuleList(nn.Linear(1, 1) for _ in range(3)), "other": nn.Linear(1, 1)})
    keep_modules(model, ["inner.2"])
    assert [name for name, _ in model.named_parameters()] == ["inner.2.weight", "inner.2.bias"]
    assert len(list(model["inner"])) == 1


def test_stages_of_one_rank_form_one_module_by_name():
    stages = [chain(0), chain(3)]
    union = StagesOfRank(stages)
    expected = [name for name, _ in chain().named_parameters() if not name.startswith(("blocks.1", "blocks.2"))]
    assert [name for name, _ in union.named_parameters()] == expected
    assert union.get_parameter("blocks.3.weight") is stages[1].blocks["3"].weight
    assert union.get_parameter("front.bias") is stages[0].front.bias


V_ORDER = (
    ("0F0 0F1 3F0", "3I0 3W0 3F1 3I1 3W1 0I0 0W0 0I1 0W1"),
    ("1F0 2F0 1F1 2F1 2I0 2W0", "1I0 1W0 2I1 2W1 1I1 1W1"),
)
LOOP_ORDER = (
    ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",),
    ("1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",),
)
EXPLICIT_ORDER = (
    ("0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1",
     "2SEND_B1 0RECV_B0 0B0 0RECV_B1 0B1"),
    ("1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 3RECV_F1 3F1 3B1 3SEND_B1",
     "1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1"),
)  # fmt: skip
ORDERS = {
    "back and forth": (V_ORDER, ((0, 3), (1, 2))),
    "in turn": (LOOP_ORDER, ((0, 2), (1, 3))),
    "with communication": (EXPLICIT_ORDER, ((0, 2), (1, 3))),
}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, y


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def run_order(name: str, factor: float | None, result: str | None = None) -> dict:
    """Gradients and losses of this rank after two training passes with an evaluation between them."""
    order, stages_of_rank = ORDERS[name]
    rank = torch.distributed.get_rank()
    like = torch.empty(2, WIDTH, dtype=torch.float64, device="meta", requires_grad=True)
    pipeline = Pipeline(
        stages=STAGES,
        stages_of_rank=stages_of_rank,
        microbatches=2,
        build_stage=lambda model, index, mesh, device: PipelineStage(
            model, index, len(STAGES), device, input_args=like, output_args=like
        ),
        build_schedule=lambda stages, loss: ordered_schedule(
            order, stages, n_microbatches=2, loss_fn=lambda output, target: loss(output, target) / 4, scale_grads=False
        ),
    )
    device = torch.device("cpu")
    stages = [pipeline.build_stage(chain(index, result), index, None, device) for index in stages_of_rank[rank]]
    staged = StagedModel(pipeline, stages, loss=mean_square)
    if factor is not None:
        staged.give_all(factor=torch.tensor(factor, dtype=torch.float64))
    x, y = inputs()
    given, target = (x,) if staged.holds_first else (), y if staged.holds_last else None
    first: list[torch.Tensor] = []
    second: list[torch.Tensor] = []
    staged.schedule.step(*given, target=target, losses=first, return_outputs=False)
    with torch.no_grad():
        evaluated = staged.evaluate_pass(given, target)
    staged.schedule.step(*given, target=target, losses=second, return_outputs=False)
    return {
        "losses": [[4 * float(loss) for loss in losses] for losses in (first, evaluated, second)],
        "holds": (staged.holds_first, staged.holds_last),
        "gradients": {name: parameter.grad for name, parameter in staged.whole.named_parameters()},
    }


@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize("name", ORDERS)
def test_order_of_actions_gives_the_gradients_of_the_model(name: str, factor: float | None, gloo):
    compare(gloo(2)(run_order, name, factor), factor)


@pytest.mark.parametrize("result", RESULTS)
def test_stages_that_return_views_have_the_gradients_of_the_model_where_the_backward_is_split(result: str, gloo):
    compare(gloo(2)(run_order, "back and forth", None, result), None)


def compare(results: list[dict], factor: float | None) -> None:
    """Compare the gradients and losses of both ranks with those of the whole model."""
    model = chain()
    x, y = inputs()
    scale = None if factor is None else torch.tensor(factor, dtype=torch.float64)
    expected = [mean_square(model(a, scale), b) for a, b in zip(x.split(2), y.split(2), strict=True)]
    (2 * sum(expected) / 4).backward()
    gradients = {key: value for result in results for key, value in result["gradients"].items()}
    assert gradients.keys() == {key for key, _ in model.named_parameters()}
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=0, atol=1e-14, msg=key)
    for result in results:
        values = [pytest.approx(loss.item(), abs=1e-14) for loss in expected] if result["holds"][1] else []
        assert result["losses"] == [values] * 3
