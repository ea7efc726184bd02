"""`torch.compile` on the simulated device."""
