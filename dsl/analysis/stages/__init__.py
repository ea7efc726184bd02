"""Stages of a pipeline: where they can begin, the calls between these points, and the order of their actions."""
