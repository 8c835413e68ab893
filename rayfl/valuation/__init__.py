"""What clients have contributed to the model: values of the clients of a round, as of players of a game."""
