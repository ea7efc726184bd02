"""Training by a lowered program: its description and objects, one step, the loop over steps, and where it begins."""
