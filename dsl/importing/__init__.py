"""Import of configurations of other trainers: a plan from a TorchTitan TOML file, and what of it no plan says."""
