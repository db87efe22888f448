"""The command line: the only package that reads flags, prints and exits."""
