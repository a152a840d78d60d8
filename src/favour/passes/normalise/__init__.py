"""Passes that rewrite a graph and keep its function: into operations whose moments are known."""
