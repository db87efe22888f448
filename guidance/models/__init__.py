"""Model families, adapters, the canary, and heads that a plan adds."""
