"""Answers to editors' requests, one module per kind of request."""
