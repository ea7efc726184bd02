"""What simulated candidates show of repeated blocks: their computation and activations, and their steady state."""
