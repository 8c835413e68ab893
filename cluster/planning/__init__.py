"""How a run takes its share of a cluster: actors, measurements, nodes that join, shared folders."""
