"""Mechanisms: how does a wish about keys act on a head?"""
