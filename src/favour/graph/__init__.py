"""The user's model as a graph: what `torch.export` makes of it, nodes, sizes, reading and writing.

Nothing here knows what an operation does to a belief.
"""
