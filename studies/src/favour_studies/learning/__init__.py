"""Studies of learning through beliefs: `python -m favour_studies.learning.uci`, `… .posthoc`, `… .rates`."""
