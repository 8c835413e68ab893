"""The formats of data files that rayfl writes and reads."""
