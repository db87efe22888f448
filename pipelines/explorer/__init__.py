"""The local page on which people find patterns in heads: `side` and `workspace` compute, `server` and `routes` answer, `page` draws, `export` saves."""
