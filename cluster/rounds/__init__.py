"""The rounds of one experiment: driven, committed, interrupted, observed."""
