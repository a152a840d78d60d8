"""The HTML report of a folder of results: `favour_studies.report.build(DIR)`, or `favour report DIR`."""

from favour_studies.report.document import build

__all__ = ["build"]
