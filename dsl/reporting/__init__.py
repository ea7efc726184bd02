"""Output for people and programs: formats of diagnostics, source snippets, reference pages, explanations."""
