"""What one prediction runs: rates set, uncertain nodes marked, a rule for each, and where a method may compress."""
