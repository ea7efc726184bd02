"""Facts about a resolved plan on its model, each computed in one function and read by every floor."""
