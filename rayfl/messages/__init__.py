"""What happens to messages between clients and server: attacks, compression, privacy, rules of aggregation."""
