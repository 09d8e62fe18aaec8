"""Prints a command of the README: `python scripts/readme_command.py test`.

A command is the fenced block that follows a line `<!-- command: NAME -->`. Continuous integration and the tests run
what this prints, so that the README cannot promise another command than the one that is known to work.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
MARKED_BLOCK = re.compile(
    r"^<!-- command: (?P<name>[a-z-]+) -->\n```bash\n(?P<command>.*?)^```$", re.MULTILINE | re.DOTALL
)


def readme_commands(text: str) -> dict[str, str]:
    """The marked commands of a page, by name."""
    return {match["name"]: match["command"].strip() for match in MARKED_BLOCK.finditer(text)}


def main() -> None:
    commands = readme_commands(README.read_text(encoding="utf-8"))
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(f"usage: readme_command.py NAME, with NAME one of {', '.join(sorted(commands))}")
    print(commands[sys.argv[1]])


if __name__ == "__main__":
    main()
