"""What the heads of a published model do: every probe of heads on real data, beside the same model with random weights.

    python -m benchmarks.heads [--model FOLDER] [--only TEXT] [--store artifacts] [--out docs/results]

The model is all-MiniLM-L6-v2, which the extra `models` installs, unless --model names a folder.  The data come from public repositories
and are expected in ``GUIDE_SHARED``/data (by default ../shared/data).  Figures in the JSON are not measured again, and every stage is
skipped that the store has, so the page may be made in several sessions.
"""
