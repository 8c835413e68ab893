"""What one client costs in time and memory, measured before the actors start."""
