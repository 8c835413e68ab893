"""Time series of clients, cut into windows."""
