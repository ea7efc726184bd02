"""How is an estimate told: on a terminal, as JSON, as a page, as a trace, as a picture."""
