"""Files of runs: where they lie, how commits write them, and who may."""
