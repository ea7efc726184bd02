"""Recorders of one forward of a model on the meta device."""
