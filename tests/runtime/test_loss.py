"""The cross entropy of tokens: its value, its gradient, and its memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from legoai.runtime.errors import RunError, RunErrorCode
from legoai.runtime.loss import (
    LossFunction,
    chunked_cross_entropy,
    matching_cross_entropy,
    of_one_tensor,
    token_cross_entropy,
)
from legoai.runtime.torch_internals.distributed.fake_world import FakeStore
from legoai.runtime.torch_internals.distributed.meshes import StridedShard

BATCH, TOKENS, VOCABULARY = 2, 24, 50


def sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(BATCH, TOKENS, VOCABULARY, dtype=dtype, requires_grad=True)
    return logits, torch.randint(0, VOCABULARY, (BATCH, TOKENS))


def value_and_gradient(loss: LossFunction, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets = sample(dtype)
    value = loss(logits, targets)
    value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


@pytest.mark.parametrize("pieces", [1, 2, 5, TOKENS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-15), (torch.bfloat16, 1e-4)])
def test_chunked_loss_equals_the_whole_loss(pieces: int, dtype: torch.dtype, tolerance: float):
    whole = value_and_gradient(token_cross_entropy, dtype)
    parts = value_and_gradient(partial(chunked_cross_entropy, pieces=pieces), dtype)
    assert_close(parts, whole, rtol=1e-6 if dtype == torch.bfloat16 else 0, atol=tolerance)


def test_loss_is_the_token_mean_in_fp32():
    logits, targets = sample(torch.bfloat16)
    value = token_cross_entropy(logits, targets)
    assert value.dtype == torch.float32
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
    assert_close(value.double(), expected, rtol=1e-6, atol=0)


def test_loss_says_what_a_model_returns_beside_logits():
    logits, targets = sample(torch.float64)
    loss = of_one_tensor(token_cross_entropy)
    assert loss(logits, targets) == token_cross_entropy(logits, targets)
    with pytest.raises(RunError, match="returns a tuple, and the loss takes one tensor") as caught:
        loss((logits, None), targets)  # type: ignore[arg-type]
    assert caught.value.code == RunErrorCode.UNFIT_RESULT


class LargestResult(TorchDispatchMode):
    """Notes the bytes of the largest tensor in float32 that an operator returns."""

    largest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor) and item.dtype == torch.float32:
                self.largest = max(self.largest, item.nbytes)
        return result


def memory(loss: LossFunction) -> tuple[int, int]:
    """Bytes of float32 tensors saved for backward, and of the largest result in forward or backward."""
    logits, targets = sample(torch.bfloat16)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float32:
            kept[tensor.untyped_storage()._cdata] = tensor.nbytes
        return tensor

    with LargestResult() as results:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            value = loss(logits, targets)
        value.backward()
    return sum(kept.values()), results.largest


def test_only_one_chunk_exists_in_fp32():
    logits = BATCH * TOKENS * VOCABULARY * 4
    kept, largest = memory(token_cross_entropy)
    assert kept >= logits
    assert largest == logits
    kept, largest = memory(partial(chunked_cross_entropy, pieces=6))
    assert kept == 0
    assert largest == logits // 6


@pytest.mark.parametrize("placement", [Shard(1), StridedShard(1, split_factor=2)])
def test_chunked_loss_refuses_logits_that_are_sharded_on_the_sequence(placement: Placement):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        logits = DTensor.from_local(torch.zeros(2, 4, 8), mesh, [placement], run_check=False)
        with pytest.raises(ValueError, match="whole sequences"):
            chunked_cross_entropy(logits, torch.zeros(2, 8, dtype=torch.int64), pieces=2)
    finally:
        dist.destroy_process_group()


def test_chunked_loss_has_one_backward_pass():
    logits, targets = sample(torch.float64)
    value = chunked_cross_entropy(logits, targets, pieces=2)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a chunked loss has one backward pass"):
        value.backward()


def test_images_are_classified_among_the_texts_that_name_them():
    torch.manual_seed(0)
    similarities, images = torch.randn(3, 3, dtype=torch.float64), torch.tensor([1, 2, 0])
    texts = torch.tensor([2, 0, 1])  # image 0 is that of text 2
    expected = (F.cross_entropy(similarities, images) + F.cross_entropy(similarities.t(), texts)) / 2
    assert_close(matching_cross_entropy(similarities, images), expected)


@pytest.mark.slow
def test_compiled_loss_equals_the_eager_one():
    torch._dynamo.reset()
    assert_close(
        value_and_gradient(torch.compile(token_cross_entropy, fullgraph=True), torch.float64),
        value_and_gradient(token_cross_entropy, torch.float64),
        rtol=0,
        atol=1e-14,
    )
