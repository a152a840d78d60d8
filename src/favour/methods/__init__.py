"""Methods: how beliefs travel through a network. One file each; `favour.compile(model, x, method=...)` takes them.

| object       | in short                                                | forward passes, C outputs        |
|--------------|---------------------------------------------------------|----------------------------------|
| `Adjoint`    | a reverse sweep of covectors to every source of noise   | 2 + C, or 2 + k for k directions |
| `DPLR`       | Algorithm 1 of the paper after every linear map, rank r | 2 + r + 2rK                      |
| `Full`       | every dimension of every noise, never compressed        | thousands                        |
| `Diag`       | variances alone                                         | 2                                |
| `Linearised` | the network's Jacobian at the mean, no second order     | 2 + C, or 2 + k for k directions |
| `Sampling`   | n draws of the network                                  | n                                |
| `Pooled`     | n draws, pooled by what `Diag` says                     | 2 + n                            |

`method="auto"` chooses between `Adjoint`, `DPLR` and `Pooled` by what they cost (`favour.methods.auto`). A method of
your own is one file, see `favour.methods.method`.
"""

from favour.methods.adjoint import Adjoint
from favour.methods.auto import Auto
from favour.methods.diag import Diag
from favour.methods.dplr import DPLR
from favour.methods.full import Full
from favour.methods.linearised import Linearised
from favour.methods.method import METHODS, Bound, Method, Numerics, register
from favour.methods.pooled import Pooled
from favour.methods.sampling import Sampling

__all__ = [
    "DPLR",
    "METHODS",
    "Adjoint",
    "Auto",
    "Bound",
    "Diag",
    "Full",
    "Linearised",
    "Method",
    "Numerics",
    "Pooled",
    "Sampling",
    "register",
]
