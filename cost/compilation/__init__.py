"""What does `torch.compile` make of a module, on the simulated device?"""
