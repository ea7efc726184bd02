"""Parallelism of modules: axes of the mesh, the units, shards, replicas and experts on them, and the traced step."""
