"""Draw some heads of two models on one sentence, as in the first picture of the README.

    python examples/heads.py all-MiniLM-L6-v2 artifacts/model/1f0c55a2d9e38b74 heads.png

The second model is the first one after ``guide finetune`` with `recipes/plans/two-heads.toml`; see `recipes/heads.sh`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipelines.drawing import PAGE_WIDTH, attention_grid
from pipelines.probing.one_text import look

SENTENCE = "The keys to the cabinet that the old man had lost are on the table, and he could not find them"
HEADS = {
    "as published": {(0, 2): "previous token", (3, 1): "them → keys", (4, 5): "rests on [CLS]"},
    "guided": {(0, 2): "free", (2, 9): "guided: previous", (4, 5): "guided: next"},
}
"""For each model some heads, by layer and head, and what to call them."""


def main() -> None:
    *folders, picture = map(Path, sys.argv[1:])
    looked = [look(folder, SENTENCE) for folder in folders]
    rows = {
        name: {f"{layer}-{head}: {what}": maps.map(layer, head) for (layer, head), what in heads.items()}
        for (name, heads), maps in zip(HEADS.items(), looked, strict=True)
    }
    title = f"One sentence in {folders[0].name}"
    picture.write_bytes(attention_grid(rows, looked[0].labels, title=title, width=PAGE_WIDTH))


if __name__ == "__main__":
    main()
