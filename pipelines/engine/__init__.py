"""How stages run: from settings to an artifact, in shards, on processes or clusters."""
