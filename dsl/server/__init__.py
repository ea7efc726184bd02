"""Language server: what an editor asks about the plan in its buffer, answered by what the commands call."""
