"""Rules about what tensor, context and expert parallelism shard: styles, placements, sizes and layouts."""
