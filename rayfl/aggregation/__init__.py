"""Exact sums of weighted trees, the same for every grouping and order."""
