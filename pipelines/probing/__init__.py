"""What all probes share: models that are watched while they read words, and tables and pictures with one entry per head."""
