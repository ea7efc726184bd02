"""Emission of what says where a program runs: devices, mesh, allocator, host memory."""
