"""`python -m favour.cli`."""

from favour.cli import main

main()
