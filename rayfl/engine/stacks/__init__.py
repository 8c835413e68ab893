"""Local steps of many clients at once, whose models are stacked."""
