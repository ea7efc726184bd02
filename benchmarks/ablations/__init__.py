"""Ablations that papers on the compilation of sharded training published, simulated with plans on the graph backend."""
