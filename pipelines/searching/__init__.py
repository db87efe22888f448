"""The settings that a search compares, and the runs that it trains."""
