"""The papers' tables run again: which runs a table needs, in full or scaled down, and ours beside theirs."""
