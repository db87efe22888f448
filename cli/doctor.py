"""guide doctor."""
