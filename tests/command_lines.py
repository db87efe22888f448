"""Runs the command lines of a file, each a JSON list, one after the other; `tests.tiny.torchrun` starts it in every process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from cli.main import run

if __name__ == "__main__":
    os.fsync = lambda descriptor: None  # no test cuts the power
    for line in Path(sys.argv[1]).read_text().splitlines():
        if code := run(json.loads(line)):
            sys.stderr.write(f"failed: guide {' '.join(json.loads(line))}\n")
            sys.exit(code)
