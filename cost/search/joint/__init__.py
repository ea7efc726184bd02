"""Joint answers of the holes that decide memory: the holes, and what their values were seen to take."""
