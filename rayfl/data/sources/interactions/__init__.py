"""Interactions of users with items."""
