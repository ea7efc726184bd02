"""Rules about units of `fsdp`, replicas, and the schedule of their collectives."""
