"""Facts about compiled modules: their graph breaks, the checkpoints inside their graphs, and the compiler's budgets."""
