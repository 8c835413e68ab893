"""Networks that a configuration can name."""
