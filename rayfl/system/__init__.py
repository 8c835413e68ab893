"""Simulated devices: how fast clients are, when they can be reached, and how long a round takes on a virtual clock."""
