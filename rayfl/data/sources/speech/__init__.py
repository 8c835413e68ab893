"""Data sets of speech."""
