"""Figures of finished runs, fit for papers: one module a kind, each writes its numbers as CSV too."""
