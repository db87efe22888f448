"""Commands that are not stages: checking the installation and architectures, converting pickled weights."""
