"""How good predictions are beside others: correlations, tests of significance, and metrics of two systems."""

_LOWER_IS_BETTER = ("loss", "nll", "perplexity", "bits_per_byte", "mse", "pk", "window_diff", "error")
"""The ends of their names."""


def lower_is_better(metric: str) -> bool:
    """Whether a metric, or a column ``eval/<task>/<metric>``, is better when it is lower."""
    return metric.lower().endswith(_LOWER_IS_BETTER)
