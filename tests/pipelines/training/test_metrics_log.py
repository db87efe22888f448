"""The log of metrics repairs itself from its copy: single damages anywhere, and cuts."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from pipelines.storage.manifest import ArtifactDamaged
from pipelines.training.metrics_log import METRICS_COPY, METRICS_LOG, Beginning, MetricsLog

ROWS = [{"step": step, "loss/mlm": 7 - step / 8} for step in range(1, 9)]


@pytest.fixture
def recorded(tmp_path: Path) -> Beginning:
    """A log of eight steps; gives what a checkpoint after the sixth records."""
    written = MetricsLog(tmp_path)
    written.restore(0)
    with written.opened():
        for row in ROWS:
            written.add(row)
            if row["step"] == 6:
                written.sync()
                found = written.written
    return found


def both(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in (METRICS_LOG, METRICS_COPY)]


def test_a_resumed_log_continues_after_the_step_of_its_checkpoint(tmp_path: Path, recorded: Beginning) -> None:
    resumed = MetricsLog(tmp_path)
    assert resumed.restore(6, recorded) == ROWS[5]
    with resumed.opened():
        resumed.add(ROWS[6])
    rows = [json.loads(line) for line in (tmp_path / METRICS_LOG).read_bytes().splitlines()]
    assert rows == ROWS[:7] and len(set(both(tmp_path))) == 1
    assert MetricsLog(tmp_path).restore(7, resumed.written) == ROWS[6]


@pytest.mark.parametrize("name", [METRICS_LOG, METRICS_COPY])
def test_every_damage_of_one_file_is_repaired_from_the_other(
    name: str, tmp_path: Path, recorded: Beginning, caplog: pytest.LogCaptureFixture
) -> None:
    whole = (tmp_path / name).read_bytes()
    flips = [(place, 1 << bit) for place in range(recorded.size) for bit in (0, 3, 6)]
    damages = [whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :] for place, bit in flips]
    for damaged in [*damages, b"", whole[: recorded.size - 1], whole[1:], bytes(len(whole)), None]:
        if damaged is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert MetricsLog(tmp_path).restore(6, recorded) == ROWS[5]
        assert both(tmp_path) == [whole[: recorded.size]] * 2
        assert str(tmp_path / name) in caplog.text and "is whole and replaces it" in caplog.text


def test_a_log_damaged_twice_is_refused(tmp_path: Path, recorded: Beginning) -> None:
    for path in (tmp_path / METRICS_LOG, tmp_path / METRICS_COPY):
        data = np.frombuffer(path.read_bytes(), np.uint8).copy()
        data[20] ^= 1
        path.write_bytes(data.tobytes())
    with pytest.raises(ArtifactDamaged, match=f"{METRICS_LOG}: damaged, and {METRICS_COPY} beside it too"):
        MetricsLog(tmp_path).restore(6, recorded)


def test_a_log_without_a_record_is_continued_by_its_steps(tmp_path: Path, recorded: Beginning) -> None:
    """Unfinished runs of versions that recorded no digest, and kept no copy."""
    (tmp_path / METRICS_COPY).unlink()
    assert MetricsLog(tmp_path).restore(6) == ROWS[5]
    assert both(tmp_path)[0] == both(tmp_path)[1]
    with pytest.raises(ArtifactDamaged, match="neither holds the metrics of steps 1 to 7"):
        MetricsLog(tmp_path).restore(7)
