"""The canonical layout of a plan, and edits that preserve the rest of its text."""
