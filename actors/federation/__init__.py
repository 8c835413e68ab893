"""All clients of a run as the driver sees them."""
