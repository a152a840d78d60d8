"""The numbers the paper prints: tables 1 to 3, areas under curves in per cent, mean ± sd of ten inferences.

A line is: pair of data sets, model, inference, then JSD, maximum probability, entropy, Mahalanobis and KL. Table 1 is
the part of table 2 on MNIST against Fashion-MNIST, without KL.
"""

from __future__ import annotations

SCORES = ("jsd", "max_probability", "entropy", "mahalanobis", "kl")

_AUROC = """
mnist07-mnist89 vi Freq. - 97.0±0.0 97.1±0.0 95.4±0.0 -
mnist07-mnist89 vi Favour 96.8±0.0 97.1±0.0 97.2±0.0 96.0±0.0 96.9±0.0
mnist07-mnist89 vi MC 95.8±0.1 96.8±0.0 97.0±0.0 93.7±0.1 88.1±3.2
mnist07-mnist89 dropout10 Freq. - 89.1±0.0 97.1±0.0 79.6±0.0 -
mnist07-mnist89 dropout10 Favour 89.1±0.0 89.0±0.0 97.2±0.0 80.5±0.0 62.1±0.0
mnist07-mnist89 dropout10 MC 95.8±0.2 92.5±0.3 96.7±0.1 75.8±0.3 73.7±0.4
mnist07-mnist89 dropout25 Freq. - 96.7±0.0 96.9±0.0 95.8±0.0 -
mnist07-mnist89 dropout25 Favour 96.9±0.0 96.8±0.0 97.0±0.0 95.9±0.0 57.7±0.0
mnist07-mnist89 dropout25 MC 95.7±0.1 95.9±0.1 96.0±0.1 86.9±0.2 79.1±1.3
mnist07-mnist89 dropout50 Freq. - 95.9±0.0 96.0±0.0 90.8±0.0 -
mnist07-mnist89 dropout50 Favour 95.8±0.0 96.0±0.0 96.1±0.0 90.3±0.0 42.7±0.0
mnist07-mnist89 dropout50 MC 91.5±0.3 93.7±0.2 93.8±0.2 57.3±0.4 81.6±5.4
mnist-fashion_mnist vi Freq. - 64.5±0.0 64.2±0.0 67.9±0.0 -
mnist-fashion_mnist vi Favour 79.6±0.0 63.6±0.0 63.3±0.0 77.2±0.0 81.2±0.0
mnist-fashion_mnist vi MC 78.5±0.1 65.3±0.1 65.0±0.1 72.2±0.1 49.3±0.7
mnist-fashion_mnist dropout10 Freq. - 77.2±0.0 77.0±0.0 93.3±0.0 -
mnist-fashion_mnist dropout10 Favour 82.8±0.0 77.3±0.0 77.1±0.0 93.9±0.0 82.5±0.0
mnist-fashion_mnist dropout10 MC 85.1±0.1 83.1±0.1 82.1±0.1 93.7±0.1 88.2±0.5
mnist-fashion_mnist dropout25 Freq. - 72.3±0.0 72.0±0.0 75.5±0.0 -
mnist-fashion_mnist dropout25 Favour 88.9±0.0 72.0±0.0 71.7±0.0 78.2±0.0 55.5±0.0
mnist-fashion_mnist dropout25 MC 90.9±0.2 73.0±0.1 72.0±0.2 79.5±0.1 75.3±0.7
mnist-fashion_mnist dropout50 Freq. - 66.6±0.0 65.7±0.0 93.4±0.0 -
mnist-fashion_mnist dropout50 Favour 76.8±0.0 67.7±0.0 66.7±0.0 94.5±0.0 86.6±0.0
mnist-fashion_mnist dropout50 MC 83.2±0.3 78.0±0.3 73.7±0.2 89.2±0.1 79.4±0.7
cifar10-svhn dropout10 Freq. - 79.9±0.0 85.8±0.0 35.4±0.0 -
cifar10-svhn dropout10 Favour 65.2±5.9 80.2±0.1 86.0±0.1 36.3±0.1 82.6±11.5
cifar10-svhn dropout10 MC 50.8±0.2 77.8±0.1 83.4±0.1 37.5±0.1 91.3±0.1
cifar10-svhn dropout25 Freq. - 88.1±0.0 85.2±0.0 82.5±0.0 -
cifar10-svhn dropout25 Favour 84.6±3.9 87.4±0.1 84.6±0.1 85.0±0.3 64.5±12.5
cifar10-svhn dropout25 MC 71.5±0.2 85.3±0.1 80.8±0.1 83.0±0.1 83.6±0.1
cifar10-svhn dropout50 Freq. - 80.4±0.0 73.0±0.0 91.5±0.0 -
cifar10-svhn dropout50 Favour 78.9±4.1 78.0±0.4 71.4±0.4 91.4±0.2 53.6±9.2
cifar10-svhn dropout50 MC 69.6±0.2 78.9±0.1 71.3±0.1 87.4±0.1 79.8±0.2
cifar10-svhn vi Freq. - 83.0±0.0 84.0±0.0 32.7±0.0 -
cifar10-svhn vi Favour 56.5±0.0 82.9±0.0 84.0±0.0 32.9±0.0 79.3±0.0
cifar10-svhn vi MC 58.4±0.2 82.2±0.0 83.4±0.0 32.9±0.0 75.1±0.1
"""

_AUPR = """
mnist07-mnist89 dropout10 Freq. - 41.5±0.0 48.0±0.0 99.6±0.0 -
mnist07-mnist89 dropout10 Favour 28.5±1.2 41.3±0.1 47.9±0.1 99.6±0.0 97.1±0.8
mnist07-mnist89 dropout10 MC 43.8±0.8 41.8±0.8 44.9±0.9 99.4±0.0 99.4±0.0
mnist07-mnist89 dropout25 Freq. - 52.9±0.0 56.1±0.0 99.7±0.0 -
mnist07-mnist89 dropout25 Favour 46.0±1.9 51.8±0.7 55.7±0.2 99.7±0.0 94.9±2.1
mnist07-mnist89 dropout25 MC 48.4±0.9 48.9±0.9 49.4±0.9 99.3±0.1 99.2±0.1
mnist07-mnist89 dropout50 Freq. - 64.5±0.0 65.3±0.0 99.7±0.0 -
mnist07-mnist89 dropout50 Favour 61.5±4.0 64.2±1.1 65.3±0.6 99.7±0.0 71.8±11.9
mnist07-mnist89 dropout50 MC 54.5±1.1 56.1±1.2 56.6±1.0 97.1±0.1 97.9±0.3
mnist07-mnist89 vi Freq. - 40.4±0.0 40.6±0.0 99.0±0.0 -
mnist07-mnist89 vi Favour 45.1±0.0 42.6±0.0 42.8±0.0 98.9±0.0 99.2±0.0
mnist07-mnist89 vi MC 43.7±0.7 43.7±0.5 43.4±0.8 98.6±0.1 91.6±1.1
mnist-fashion_mnist vi Freq. - 60.7±0.0 61.1±0.0 77.5±0.0 -
mnist-fashion_mnist vi Favour 85.1±0.0 56.7±0.0 56.5±0.0 82.7±0.0 80.0±0.0
mnist-fashion_mnist vi MC 83.0±0.2 57.7±0.2 57.8±0.4 79.0±0.1 64.9±0.2
mnist-fashion_mnist dropout10 Freq. - 75.9±0.0 75.7±0.0 95.2±0.0 -
mnist-fashion_mnist dropout10 Favour 84.7±0.0 75.9±0.0 75.7±0.0 95.5±0.0 88.1±0.0
mnist-fashion_mnist dropout10 MC 87.1±0.2 82.8±0.3 80.3±0.3 95.4±0.1 91.7±0.3
mnist-fashion_mnist dropout25 Freq. - 60.5±0.0 59.9±0.0 79.2±0.0 -
mnist-fashion_mnist dropout25 Favour 90.4±0.0 59.9±0.0 59.4±0.0 81.6±0.0 60.7±0.0
mnist-fashion_mnist dropout25 MC 92.4±0.2 59.8±0.1 58.9±0.1 83.0±0.1 79.6±0.5
mnist-fashion_mnist dropout50 Freq. - 65.5±0.0 62.9±0.0 95.0±0.0 -
mnist-fashion_mnist dropout50 Favour 80.7±0.0 65.9±0.0 63.2±0.0 95.8±0.0 83.9±0.0
mnist-fashion_mnist dropout50 MC 86.6±0.3 75.6±0.4 66.9±0.2 91.6±0.1 84.7±0.4
cifar10-svhn dropout10 Freq. - 89.1±0.0 92.3±0.0 60.5±0.0 -
cifar10-svhn dropout10 Favour 74.5±3.8 89.2±0.0 92.0±0.3 60.8±0.0 85.4±7.9
cifar10-svhn dropout10 MC 67.0±0.1 87.3±0.3 89.4±0.1 61.2±0.1 93.4±0.1
cifar10-svhn dropout25 Freq. - 91.2±0.0 87.2±0.0 87.0±0.0 -
cifar10-svhn dropout25 Favour 88.6±2.4 90.4±0.1 86.3±0.1 88.3±0.2 76.8±7.6
cifar10-svhn dropout25 MC 79.6±0.2 88.8±0.1 83.1±0.1 87.0±0.1 89.1±0.2
cifar10-svhn dropout50 Freq. - 85.5±0.0 78.4±0.0 93.8±0.0 -
cifar10-svhn dropout50 Favour 83.6±3.2 82.6±0.4 76.9±0.3 93.9±0.1 70.0±5.8
cifar10-svhn dropout50 MC 79.4±0.1 84.2±0.1 76.9±0.1 91.4±0.1 87.5±0.2
cifar10-svhn vi Freq. - 89.4±0.0 89.1±0.0 59.4±0.0 -
cifar10-svhn vi Favour 68.3±0.0 89.4±0.0 89.1±0.0 59.5±0.0 83.1±0.0
cifar10-svhn vi MC 69.7±0.1 89.0±0.2 88.7±0.0 59.5±0.0 81.8±0.1
"""

Number = dict[str, float]
Table = dict[tuple[str, str, str], dict[str, Number | None]]


def _parsed(text: str) -> Table:
    table: Table = {}
    for line in text.strip().splitlines():
        pair, model, inference, *cells = line.split()
        numbers: dict[str, Number | None] = {}
        for score, cell in zip(SCORES, cells, strict=True):
            mean, _, sd = cell.partition("±")
            numbers[score] = {"mean": float(mean), "sd": float(sd)} if sd else None
        table[pair, model, inference] = numbers
    return table


TABLES = {"auroc": _parsed(_AUROC), "aupr": _parsed(_AUPR)}


def numbers(measure: str, pair: str, model: str, inference: str) -> dict[str, Number | None]:
    """A row of a table; empty if the paper has none.

    >>> numbers("auroc", "mnist-fashion_mnist", "vi", "Favour")["jsd"]
    {'mean': 79.6, 'sd': 0.0}
    """
    return TABLES[measure].get((pair, model, inference), {})
