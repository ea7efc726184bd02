"""Rules about what is trained, and on what: the model, the batch, the optimizer, the data."""
