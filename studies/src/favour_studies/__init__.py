"""Studies of Favour: the paper's experiments, their report, and what methods cost; on Favour's public names only."""
