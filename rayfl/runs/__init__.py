"""Finished (or paused) runs: opened, listed, exported, verified and repaired."""
