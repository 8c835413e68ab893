"""Which clients take part in a round: strategies that choose them by what is known of each."""
