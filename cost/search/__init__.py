"""The search: holes of a plan filled so that a figure of the estimate is best and every requirement is met."""
