"""Values of a plan: names, arithmetic and arguments of the syntax tree, read against their declared kinds."""
