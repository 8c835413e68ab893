"""Runs clients' procedures: local updates, one by one or stacked, and scores."""
