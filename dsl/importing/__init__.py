"""Import of other trainers' configurations: a TorchTitan TOML file to a plan, and what is left untranslated."""
