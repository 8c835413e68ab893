"""Data sets of texts: news, instructions with their responses, preferences."""
