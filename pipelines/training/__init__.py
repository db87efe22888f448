"""Training: the loop; data, models, processes, checkpoints and logs around it; a row for each objective; and learners.

``objectives/`` holds what is known about each objective without torch, ``learners/`` what the loop trains for it.
"""
