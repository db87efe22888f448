"""The local page on which people find patterns in heads: `workspace` computes, `server` answers, `page` draws, `export` saves."""
