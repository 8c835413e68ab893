"""Reports on runs: one self-contained page with figures, of one run or of several side by side."""
