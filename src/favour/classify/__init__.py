"""What people do with a belief: probabilities, scores, and fitting both to held-out data."""
