"""These tests take a device's place in tests that run on a CPU: those modules are found from here too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "integration"))
