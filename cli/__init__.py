"""The command line: the only part that prints, exits and reads flags."""
