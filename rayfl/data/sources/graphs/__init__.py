"""Data sets of graphs, and graphs whose nodes have classes."""
