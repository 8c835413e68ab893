"""The results of a run: scores, their summaries, and the columns of its tables."""
