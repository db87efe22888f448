"""How good predictions are beside others: correlations, tests of significance, and metrics of two systems."""
