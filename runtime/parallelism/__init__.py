"""Parallelism on meshes beyond that of torch: styles, experts, stages of a pipeline, and units of FSDP."""
