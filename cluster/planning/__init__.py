"""Plans a run's share of a cluster: actors, measurements, nodes that join, shared folders."""
