"""What an adversary and guidance do to a model that has learned something already; one command per table.

    python -m benchmarks.pretraining TABLE [--seeds 1] [--only TEXT] [--steps N] [--store artifacts] [--out docs/results]

The texts come from public repositories and are expected in ``GUIDE_SHARED``/data (by default ../shared/data):
``lm-litbank-books`` (LitBank's ``original/*.txt``) and ``cls-masakhanews`` (MasakhaNEWS, Oromo).  Comparisons that train from the
start are scripts of commands, in ``recipes/``.

Runs whose figures are in the JSON of the table are not repeated, and interrupted ones are continued, so a table may be
made in several sessions.  Losses are those of the task alone, in nats; the final loss is a mean over 50 steps.  The
baseline is the best setting without a plan; every other run is compared with its run of the same seed.  *Steps to* says when
each run, the baseline too, first had the losses that the baseline has after a half and all of its steps.
"""
