"""Private names of torch's fake tensors, of which the simulated device consists."""

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

__all__ = ["FakeTensor", "FakeTensorMode", "unset_fake_temporarily"]
