"""The user's model as a graph of operations that have rules: captured by `torch.export`, then rewritten, pass by pass.

`graph` captures; the passes put the graph into a form whose moments are known (in-place code, composite operations,
attention, recurrent layers, element-wise code as one function, maxima and roots behind dropout).
"""
