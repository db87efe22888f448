"""Guided models as folders that plain transformers opens: the code of the plan, out of the source of `guidance`."""
