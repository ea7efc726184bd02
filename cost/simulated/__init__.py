"""The simulated device: execution of one rank without an accelerator and without values."""
