"""Gradients of losses: in closed form, of stacked clients, and of single samples."""
