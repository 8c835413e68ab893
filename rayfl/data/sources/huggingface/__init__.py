"""Data sets of Hugging Face that lie in a folder."""
