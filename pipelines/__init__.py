"""Stages, the engine that runs them, and the artifacts that they read and write."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The folder that holds our packages: a checkout, or ``site-packages``."""
