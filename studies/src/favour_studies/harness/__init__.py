"""What every measurement shares, here and in `benchmarks/`."""
