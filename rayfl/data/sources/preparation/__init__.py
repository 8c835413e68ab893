"""Data sets that are downloaded, packed once and read in place."""
