"""Calls of the command line and of the language server."""
