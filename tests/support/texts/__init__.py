"""Plans as texts: written, drawn at random, or combined from parts."""
