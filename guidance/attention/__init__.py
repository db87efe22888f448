"""The attention path: what transformers calls, and which heads go which way."""
