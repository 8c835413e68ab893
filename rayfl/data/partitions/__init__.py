"""Which client owns which sample: partitions, their splits, noise, statistics and picture."""
