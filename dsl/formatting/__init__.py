"""The canonical layout of a plan, and edits that leave the rest of its text as it was."""
