"""Local steps of one client after the other, on flat buffers."""
