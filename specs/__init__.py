"""What a plan talks about: the resolved plan, directives, clusters, units, reference models."""
