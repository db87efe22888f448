"""Objectives: what a model is trained for besides its guides."""
