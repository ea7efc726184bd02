"""Output forms of an estimate: terminal summary, JSON, HTML page, Chrome trace, SVG pictures."""
