"""A captured network, ready to run: graph, tensors, plan and method (see `favour.program.program`)."""
