"""The command ``rayfl``, one module for each group of commands."""
