"""Models of other authors, built-in and published ones, and their manifests."""
