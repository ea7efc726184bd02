"""Buckets of consecutive units: SimpleFSDP's Algorithm 1, an exact dynamic programme, and the problem both solve."""
