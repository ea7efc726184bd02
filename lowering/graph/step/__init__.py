"""A step as one graph: units that gather their parameters, the trace, its places, and its interpretation."""
