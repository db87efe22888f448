"""How stages run: settings to an artifact, work in shards, processes and clusters."""
