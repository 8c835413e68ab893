"""Scores of models on the samples of clients."""
