"""Learning tasks: losses, predictions and metrics of classifiers, language models and others."""

from rayfl.renamed import names_of

__getattr__ = names_of(__name__)
