"""Measures the time and memory that one client costs, before the actors start."""
