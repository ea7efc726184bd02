"""The device and fabric catalogue, as package data."""
