"""Rating: every row of a file, a folder or a cluster's data through a model, errors and unfamiliarity beside it.

`favour rate MODEL DATA --out FILE` on the command line; `favour.rating.rate` is the function behind it, and
`favour.scale.rate` the same on a Ray cluster.
"""

from favour.rating.loop import Rating, rate

__all__ = ["Rating", "rate"]
