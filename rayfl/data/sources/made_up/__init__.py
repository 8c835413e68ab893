"""Data that are made up from the seed."""
