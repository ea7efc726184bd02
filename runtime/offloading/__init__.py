"""Offloading to host memory: tensors saved for backward, optimizer state, and the copies in a traced step."""
