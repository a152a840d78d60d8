"""`favour check`: a model on its user's own data, its beliefs beside samples of itself.

source      the model, and a predictor of it
reading     inputs from files
measure     the belief's error, the samples it is worth, and what both cost here
figures     error against time, predicted against sampled
report      what was found, on a terminal and on a page
"""
