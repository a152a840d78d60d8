"""Methods: generic algorithms over surrogates. They know nothing of particular operations."""
