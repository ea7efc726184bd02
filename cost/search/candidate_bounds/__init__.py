"""Lower bounds of the step time and memory of candidates and nodes, composed of the bounds of their parts."""
