"""Branch and bound over the holes of a plan, with what orders, seeds and tightens it."""
