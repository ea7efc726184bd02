"""When the operations of ranks run, and where the time of a step goes."""
