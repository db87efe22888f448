"""The stages: one file each, from settings and input artifacts to one artifact."""
