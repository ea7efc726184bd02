"""Joint decision of the holes that determine memory: the holes, and what their values were observed to cost."""
