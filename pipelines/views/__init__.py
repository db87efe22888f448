"""Views for people: plans, patterns on a text, learning curves and comparisons, as text, tables and pictures."""
