"""Lower bounds over all choices of holes that are still open: styles on `tp`, and treatments of blocks."""
