"""A user's own tables, column by column: what stands in them, as arrays."""
