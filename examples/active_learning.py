"""Batch active learning: label the digits that teach the most together.

python examples/active_learning.py        (needs favour[sklearn])

A pool of unlabelled digits, twenty labels at a time. The twenty digits the network is least sure of are often alike.
Their *joint* belief says which are: chosen greedily, each digit is the one whose class is still most uncertain given
those of the digits chosen before,

    Var[y_c | y_chosen] = Σ_cc − Σ_cs (Σ_ss + σ²I)⁻¹ Σ_sc,      Σ from predict.joint(candidates).

Accuracy on held-out digits, mean of several repetitions.
"""

import torch
from sklearn.datasets import load_digits

import favour
from favour.sklearn import FavourClassifier

rounds, size, start, repetitions = 4, 20, 20, 2
data = load_digits()
order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(0)).numpy()
X, y = data.data[order] / 16, data.target[order]
pool, test = slice(0, 1200), slice(1200, None)


def fit(rows, seed):
    model = FavourClassifier((64,), dropout=0.2, epochs=60, batch_size=20, validation_fraction=0.0, random_state=seed)
    return model.fit(X[rows], y[rows])


def inputs(model, rows):
    return torch.tensor((X[rows] - model.x_mean_) / model.x_scale_)


def at_random(model, left, generator):
    return left[torch.randperm(len(left), generator=generator)[:size]]


def least_sure(model, left, generator):
    belief = model.predictor(inputs(model, left))
    return left[favour.scores.jsd(belief).argsort(descending=True)[:size]]


def together(model, left, generator, among=200, noise=0.1):
    """Greedy on the joint belief of some candidates, over their class probabilities."""
    few = left[torch.randperm(len(left), generator=generator)[:among]]
    with torch.no_grad():
        joint = model.predictor.joint(inputs(model, few))  # all candidates meet the same network
    p = joint.mean[0].softmax(-1)  # (among, C)
    C = p.shape[1]
    J = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)  # softmax to first order
    cov = torch.einsum("aik,akbl,bjl->aibj", J, joint.covariance_matrix[0].reshape(among, C, among, C), J)
    chosen = []
    for _ in range(size):
        gain = cov.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1).sum(-1)  # Σ_k Var[p_ck], by candidate
        gain[chosen] = -1
        best = int(gain.argmax())
        chosen.append(best)
        K = cov[best, :, best] + noise * torch.eye(C)  # condition all candidates on what this one would say
        column = cov[:, :, best]  # (among, C, C)
        cov = cov - torch.einsum("aik,kl,bjl->aibj", column, torch.linalg.inv(K), column)
    return few[chosen]


ways = {"random": at_random, "least sure (JSD)": least_sure, "together (joint)": together}
print(f"{'labels':22s}" + "".join(f"{start + size * i:8d}" for i in range(rounds + 1)))
for name, choose in ways.items():
    accuracy = torch.zeros(rounds + 1)
    for repetition in range(repetitions):
        generator = torch.Generator().manual_seed(repetition)
        shuffled = torch.randperm(1200, generator=generator)
        rows, left = shuffled[:start], shuffled[start:]
        for i in range(rounds + 1):
            model = fit(rows.numpy(), repetition)
            accuracy[i] += model.score(X[test], y[test]) / repetitions
            new = choose(model, left, generator)
            rows = torch.cat([rows, new])
            left = left[~torch.isin(left, new)]
    print(f"{name:22s}" + "".join(f"{a:8.3f}" for a in accuracy), flush=True)
