"""The pool of gloo ranks returns every rank's result, and raises the error of the first that failed."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from legoai.runtime import RunError, RunErrorCode
from support.training.gloo import RankError


def total_of_ranks(offset: int) -> int:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return int(value)


def fail_on(rank: int) -> int:
    if rank in (dist.get_rank(), -1):
        raise RunError(RunErrorCode.DEVICE, f"rank {dist.get_rank()} fails", help="do not")
    return dist.get_rank()


def test_ranks_compute_together(gloo):
    assert gloo(4)(total_of_ranks, 10) == [46] * 4


def test_the_first_failing_rank_is_raised_and_the_pool_recovers(gloo):
    with pytest.raises(RunError, match="rank 2 fails") as caught:
        gloo(4)(fail_on, 2)
    assert "on rank 2" in caught.value.__notes__[0] and caught.value.help == "do not"
    assert gloo(4)(total_of_ranks, 0) == [6] * 4


def abort_on(rank: int) -> int:
    if rank == dist.get_rank():
        os.kill(os.getpid(), signal.SIGABRT)
    return dist.get_rank()


def test_a_rank_that_aborts_is_reported_with_its_stack_and_the_pool_recovers(gloo):
    with pytest.raises(RankError, match="rank 1 ended with SIGABRT") as caught:
        gloo(2)(abort_on, 1)
    assert "in abort_on" in caught.value.__notes__[0]
    assert gloo(2)(total_of_ranks, 0) == [1, 1]


def test_pool_forks_safely_after_computation(gloo):
    x = torch.randn(300, 300, requires_grad=True)
    (x @ x).sum().backward()
    assert gloo(2)(total_of_ranks, 0) == [1, 1]
