"""What the methods are worth in fine-tuning a published model, and the whole loop of paper E; one command per table.

    python -m benchmarks.finetuning TABLE [--only TEXT] [--data TEXT] [--store artifacts] [--out docs/results]

The data come from public repositories and are expected in ``GUIDE_SHARED``/data (by default ../shared/data).  The papers' tables
are scripts of commands, in ``recipes/``.

Each row of a table is trained with every learning rate of the table on the first seed.  The rate with the best validation is
kept for the other seeds, so that every row is tuned alike; the test split is only touched with that rate.

The tables from ``published`` on start from a published model, and are tuned with a seed that their figures do not use.  Each
row tries three settings there: learning rates, or for a method with a strength of its own three strengths, at the best rate of
plain fine-tuning.

    discovered            patterns that `guide discover` finds in a model that was pre-trained here, put into new models
    published             the methods of four papers on four tasks, 1,000 examples each
    published-methods     SMART, other masks, gates and a faster mix on the same tasks
    published-tasks       all of them on four more tasks
    published-robustness  models of QQP on pairs whose words mislead (PAWS-QQP), and HellaSwag
    published-discovered  patterns that `guide discover` finds in the fine-tuned model, put into it again

Figures in the JSON of the table are not computed again, and interrupted runs are continued, so a table may be made in several
sessions.
"""
