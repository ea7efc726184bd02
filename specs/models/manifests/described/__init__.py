"""Description of a model that was built on the meta device."""
