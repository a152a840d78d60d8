"""Class probabilities from draws of the last layers only, the belief propagated up to them.

Strong dropout skews the logits, which a Gaussian cannot say. But the last layers, the *head*, are small, and what the
reverse sweep knows, the mean μ and covariance Σ of the logits, need not be sampled. With n = A·M draws k = (a, m),

    x_a = head up to its last dropout or random layer, A times          masks and normal nodes are fixed tables
    d_k = W (mask_k ∘ x_a) + b                                          M times for each a: W or x is masked
    z_k = d̄ + L L_d⁻¹ (d_k − d̄)                                         L_d L_dᵀ = S of d, LLᵀ = wΣ + (1 − w)S
    p   = 1/n Σ_k softmax(z_k)

The third line takes most of the sampling noise out (`favour.classify.head.match` says how w is chosen); shape, skewness
and more, come from the draws. Every unit is dropped in the same number of masks, and tables are shared by all inputs:
the result is a deterministic function of the input, draws are products of matrices, and no random number is made when
predicting. A last layer with mean-field weights adds √(S²x² + s²)·ε for S² and s² the variances of weights and biases,
which is the exact law of its output given x, one input at a time.

The head begins as early as its cost allows, at most that of a forward pass: before the first draw if possible, else
behind a node that everything uncertain passes, where the forward sweep's belief is drawn from as a Gaussian: with
independent entries, or with the correlations that `rank` keeps, and draws are given the whole mean and covariance of
the belief, z_k = μ + L L_d⁻¹ (d_k − d̄) for LLᵀ = Σ and L_d L_dᵀ the covariance of d.
Cost is counted in multiplications and entries written. Eager code has some .2 ms of calls beside that, whatever the
batch: with up to 64 inputs the draws take about as long as a forward pass of a LeNet (.7 to 1.1 measured by
benchmarks/decisions.py), with 500 less (.6). Compiled code is near the count at every batch.
"""

from favour.classify.head.draw import disagreement, divergence, draws, probabilities, remember_call, sampled
from favour.classify.head.find import DRAWS, Head, find_head

__all__ = [
    "DRAWS",
    "Head",
    "disagreement",
    "divergence",
    "draws",
    "find_head",
    "probabilities",
    "remember_call",
    "sampled",
]
