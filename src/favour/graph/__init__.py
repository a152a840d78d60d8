"""The user's model as a graph: its capture by `torch.export`, nodes, sizes, reading and writing.

Nothing here knows what an operation does to a belief.
"""
