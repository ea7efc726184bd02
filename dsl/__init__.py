"""Text to plan and back: grammar, syntax tree, resolution, lint rules, formatter."""
