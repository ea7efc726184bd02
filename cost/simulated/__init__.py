"""The simulated device: one rank of many on an accelerator that is not there."""
