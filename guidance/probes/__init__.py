"""Probes: what heads do, from their attention probabilities, which `guidance.installation.Handle.watch` gives layer by layer.

The functions read tensors and plain numbers; files are read elsewhere.
"""
