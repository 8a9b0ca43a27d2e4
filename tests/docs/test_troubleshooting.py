"""docs/troubleshooting.md: the messages that it quotes are in the source."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = [
    quote
    for line in PAGE.read_text("utf-8").splitlines()
    if line.startswith("| `")
    for quote in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    if "(0018" not in quote  # the tag is added in front of its message
]


@cache
def texts() -> list[str]:
    """All string literals of the source, with `…` for inserted values, and the Makefile."""
    found = [(ROOT / "Makefile").read_text("utf-8")]
    for folder in ("src/cbmir", "runtime", "training", "export", "demo"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_exists_in_the_source(message: str) -> None:
    pattern = re.compile(".*".join(re.escape(part) for part in message.split("…")), re.DOTALL)
    assert any(pattern.search(text) for text in texts()), message
