"""`favour bench`: what Favour costs and what it is worth, beside the samplers it replaces."""

from favour.bench.compare import Change, Comparison, compare
from favour.bench.measure import keep_freed_memory
from favour.bench.networks import NETWORKS
from favour.bench.record import environment, read, write
from favour.bench.suite import METHODS, run
