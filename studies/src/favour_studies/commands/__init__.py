"""What this package adds to the command line: `favour reproduce`, `favour report` and `favour bench`."""
