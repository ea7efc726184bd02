"""Manifests, which tell a plan of its model: cached, computed of dimensions, or described on the meta device."""
