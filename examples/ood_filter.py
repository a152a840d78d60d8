"""An out-of-distribution filter: keep the inputs the network knows, set the others aside.

The network learns the digits 0 to 7 and meets 8 and 9, pictures upside down, pictures turned by a quarter, and noise.
Scores come from one pass of Favour; how well they tell the strangers is the area under the ROC curve. No score is best
everywhere: scores made from logits (JSD, entropy) fail where the network is confidently wrong, a distance in the space
of features (Mahalanobis) does not ask the network.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import favour

torch.manual_seed(0)
torch.set_num_threads(1)

# -- data
digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32)
y = torch.tensor(digits.target)
known = (y < 8).nonzero().flatten()
known = known[torch.randperm(len(known))]
train, test = known[:1000], known[1000:]
pictures = x[test].view(-1, 8, 8)
strangers = {
    "digits 8 and 9": x[y >= 8],
    "upside down": pictures.flip(1).flatten(1),
    "turned": pictures.rot90(dims=(1, 2)).flatten(1),
    "noise": torch.rand(400, 64),
}

model = nn.Sequential(
    nn.Linear(64, 100),
    nn.ReLU(),
    nn.Dropout(0.3),
    nn.Linear(100, 40),
    nn.ReLU(),
    nn.Dropout(0.3),
    nn.Linear(40, 8),
)
optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(30):
    for batch in train[torch.randperm(len(train))].split(64):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimiser.step()
torch.set_grad_enabled(False)

# -- two predictors of one network: the logits, and the features before the last layer
predict = favour.compile(model, x[:2])
features = favour.compile(model, x[:2], at="4")
distance = favour.scores.Mahalanobis(shrinkage=0.01).fit(features(x[train]), y[train])

scores = {
    "max prob.": lambda x: favour.scores.least_confidence(predict(x)),
    "entropy": lambda x: favour.scores.entropy(predict(x)),
    "JSD": predict.jsd,
    "Mahalanobis": lambda x: distance.score(features(x)),
}

print("area under the ROC curve, strangers against held-out digits 0 to 7\n")
print(f"{'':<16}" + "".join(f"{name:>13}" for name in scores))
usual = {name: score(x[test]) for name, score in scores.items()}
for kind, inputs in strangers.items():
    cells = []
    for name, score in scores.items():
        both = torch.cat([usual[name], score(inputs)])
        cells.append(favour.metrics.auroc(both, torch.arange(len(both)) >= len(test)))
    print(f"{kind:<16}" + "".join(f"{cell:>13.3f}" for cell in cells))

# -- the filter: a threshold that lets 95 % of the usual inputs through
threshold = usual["Mahalanobis"].quantile(0.95)
print("\nset aside by the filter (threshold: 5 % of known digits)")
for kind, inputs in {"digits 0 to 7": x[test], **strangers}.items():
    print(f"{kind:<16}{(scores['Mahalanobis'](inputs) > threshold).double().mean():>10.1%}")
