"""Joint decision of the holes that determine memory: the holes, and the observed costs of their values."""
