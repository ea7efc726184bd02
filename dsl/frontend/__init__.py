"""Front end: a plan's text to its syntax tree, and from there to the resolved plan."""
