"""Statistics of text that guide heads: how rare words are, which occur together, what depends on what."""
