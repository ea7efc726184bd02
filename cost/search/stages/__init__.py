"""Assignment of blocks to the stages of a pipeline."""
