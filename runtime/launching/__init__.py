"""Launching of a program: torchrun, the command line, signals, and errors that end a rank."""
