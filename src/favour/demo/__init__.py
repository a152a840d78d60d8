"""`favour demo`: a small classifier of handwritten digits, its beliefs beside samples, and what they say of inputs.

digits      data, letters that are no digits, the network and its training
story       what is shown: error against time, digits it is sure of and others, reliability
report      on a terminal and on a page
"""
