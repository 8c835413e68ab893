"""Many experiments from one command: which they are, what each has measured, and the table over seeds."""
