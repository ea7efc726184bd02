"""Devices and networks that a plan runs on, and the cost of single operations on them."""
