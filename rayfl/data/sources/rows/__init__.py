"""Sources whose samples are the rows of files, a user's own among them."""
