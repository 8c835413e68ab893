"""Clusters and jobs: files that start a cluster, checks of a machine, runs sent to a head."""
