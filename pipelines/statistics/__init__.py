"""What statistics count over a whole corpus, and how others read it."""
