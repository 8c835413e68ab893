"""What errors mean: those of devices, and those that arose in a user's own files; and what memory a machine has."""
