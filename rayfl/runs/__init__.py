"""Finished (or paused) runs, opened to be looked at: nothing here changes a run's folder."""
