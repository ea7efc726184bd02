"""Emission of what is trained and on what: model, batch, optimizer, and defaults of a run."""
