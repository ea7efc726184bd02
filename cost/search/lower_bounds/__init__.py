"""Lower bounds of parts of a step, from which the bounds of candidates and nodes are composed."""
