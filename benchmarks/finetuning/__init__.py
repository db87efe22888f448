"""What the methods are worth in fine-tuning a published model, and the whole loop of paper E; one command per table.

    python -m benchmarks.finetuning TABLE [--only TEXT] [--data TEXT] [--store artifacts] [--out docs/results]

The data come from public repositories and are expected in ``GUIDE_SHARED``/data (by default ../shared/data).  The papers' tables
are scripts of commands, in ``recipes/``.

Each row of a table is trained with every learning rate of the table on the first seed.  The rate with the best validation is
kept for the other seeds, so that every row is tuned alike; the test split is only touched with that rate.

The table ``published`` is tuned with a seed that its figures do not use.  Each row tries three settings there: learning rates,
or for a method with a strength of its own three strengths, at the best rate of plain fine-tuning.

Figures in the JSON of the table are not computed again, and interrupted runs are continued, so a table may be made in several
sessions.
"""
