"""Private names of torch's fake tensors, which the simulated device uses."""

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

__all__ = ["FakeTensor", "FakeTensorMode", "unset_fake_temporarily"]
