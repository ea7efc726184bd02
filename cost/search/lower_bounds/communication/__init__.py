"""Lower bounds of collectives, and of the buffers of FSDP's units."""
