"""A host: runs the procedures of its clients, and keeps their states and samples."""
