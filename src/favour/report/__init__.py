"""The HTML report of a folder of results: `favour.report.build(DIR)`, or `favour report DIR`."""

from favour.report.document import build

__all__ = ["build"]
