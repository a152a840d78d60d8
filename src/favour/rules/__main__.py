"""`python -m favour.rules` prints docs/operations.md: which operations have a rule, and how exact it is."""

from __future__ import annotations

import sys

from favour.rules.registry import RULES, operations_table

HEAD = """# Supported operations

`python -m favour.rules > docs/operations.md` writes this page from the registry of rules ({count} overloads).

| how exact | what that means |
|---|---|
| exact | mean and covariance are exact for any input with these second moments |
| moment-matched | exact marginals for Gaussian inputs; covariances to first order |
| linearised | a Taylor expansion at the mean |
| refused | the result is discrete, so an uncertain argument is an error |

A rule may still refuse a particular call: a product or a reduction over the batch. The
message says so when the model is compiled. Operations without an uncertain argument need no rule and run as
they are.

"""


def page() -> str:
    """The page in Markdown."""
    return HEAD.format(count=len(RULES)) + operations_table()


if __name__ == "__main__":
    import favour  # noqa: F401  (registers the rules)

    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    print(page(), end="")
