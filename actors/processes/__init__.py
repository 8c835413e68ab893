"""Hosts as Ray actors: started, placed on nodes and GPUs, called, replaced."""
