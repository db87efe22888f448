"""Counting over a whole corpus, and reading the tables that come of it."""
