"""Styles of modules under `shard`, chosen by an integer program over the module graph."""
