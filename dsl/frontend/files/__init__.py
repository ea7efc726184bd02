"""Files of plans: lookup, reading and writing, their project, and their revisions in git."""
