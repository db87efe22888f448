"""Stages: each a pure function of a configuration and input artifacts that writes one artifact."""
