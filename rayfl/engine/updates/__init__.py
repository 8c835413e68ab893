"""What a local update is: settings, mini-batches, and the requests of procedures to the engine."""
