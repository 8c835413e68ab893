"""The parts of an experiment, made from its configuration, and what a finished run gives back."""
