"""Rules about devices: the cluster, the mesh, the allocator and host memory."""
