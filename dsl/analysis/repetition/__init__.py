"""Facts about repeated modules: lists of blocks, the passages between them, and classes of equal blocks."""
