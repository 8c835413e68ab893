"""Many experiments of one command, side by side or one after the other."""
