"""Guiding attention heads: which keys a query should look at, how that wish acts on a head, and on which heads."""
