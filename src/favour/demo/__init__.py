"""`favour demo`: a small classifier of handwritten digits, predicted three ways, and a page about it."""
