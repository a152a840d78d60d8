"""Learning posteriors, dropout rates and noise through beliefs: losses, and `favour.fit`."""
