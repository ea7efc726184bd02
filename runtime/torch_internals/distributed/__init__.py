"""Private names of `torch.distributed`: process groups, meshes, pipelines and units of FSDP2."""
