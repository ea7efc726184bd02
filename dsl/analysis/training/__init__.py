"""Facts about training: the loss, the optimizer's parameters, and the learning-rate schedule."""
