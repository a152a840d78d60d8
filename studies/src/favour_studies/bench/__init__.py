"""`favour bench`: what Favour costs and what it is worth, beside the samplers it replaces."""

from favour_studies.bench.compare import Change, Comparison, compare
from favour_studies.bench.measure import keep_freed_memory
from favour_studies.bench.networks import NETWORKS
from favour_studies.bench.record import environment, read, write
from favour_studies.bench.suite import METHODS, run
