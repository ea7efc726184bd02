"""Does a lowered program compute what one device computes? Both are run, and compared."""
