"""Patterns: which keys should a query look at?"""
