"""Plain English for users: phrases to avoid, each with an alternative.

Pages are checked without inline code, code blocks and generated parts between marks; in source files, string literals
and docstrings are checked. Add a phrase when a reader stumbles over it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = "CHANGELOG.md"
#: Phrase (in any case) -> alternatives.
BANNED = {
    r"\ban own\b": "your own …, its own …",
    r"\bof (?:one's|his|your) own(?= *(?:[.,;:)|]|$|and\b|which\b|that\b))": "your own …",
    r"\banew\b": "again; rebuilt, restarted",
    r"\b(?:is|are|was|were) none\b": "there is no …; is not a …",
    r"\bnobody\b|\bno ?one else\b": "say who: no reader, no other patient",
    r"\bmend(?:s|ed|ing)?\b": "fix, correct",
    r"\b(?:is|are|was|were|be) told\b|\btold (?:of|from|apart)\b": "is reported; is distinguished",
    r"\btells? (?:nothing|well|less|apart)\b": "says nothing; distinguishes",
    r"\blook-?alikes?\b|\balike images?\b|\bthat are alike\b": "similar images (demo), neighbours (API)",
    r"\bthe truth\b": "the data; the labels",
    r"\bquiet (?:machine|one)\b": "an idle machine",
    r"\bwhatever\b": "any; for every",
    r"\bwhoever\b|\bwhomever\b|\b(?:to|for) who\b": "people who …",
    r"\bto the letter\b": "exactly",
    r"\bcame of it\b": "the result",
    r"\bthrice\b|\bhence\b": "three times; so",
    r"\bgo(?:es)? on (?:where|from|after|meanwhile)\b": "continues",
    r"\bin silence\b": "silently",
    r"\ball else\b": "everything else",
    r"\ba (?:row|command|line|vector|process|step|column|folder) an? \w+\b": "one row per image",
    r"\bfirst aid\b": "try this first",
    r"\bended with\b": "finished with",
    r"(?<!there )\bis no\b(?! (?:longer|more|less|worse|better|slower|faster|larger)\b)": "is not a …",
    r"\b(?:what|that) is no\b(?! (?:longer|more)\b)": "files that are not …",
    r"\bgives? back\b": "returns; releases",
}
#: No sentence begins with a clause as its subject.
_SENTENCE = re.compile(r"(?:^|[.:!?] |\| |- (?:\*\*)?|\*\*)(Who|Whoever|Whatever|What it is)\b", re.MULTILINE)
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if path.name != "report.md"
)

#: Folders whose messages, help texts and docstrings are checked.
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("src", "runtime", "training", "export", "demo", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
#: Files that are checked as text, including code and comments.
OTHERS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "Makefile", ROOT / "pyproject.toml",
        *(path for folder in ("training", "demo", "export", "runtime") for path in (ROOT / folder).rglob("*.*")
          if path.suffix in (".j2", ".js", ".css", ".html")),
    )
)  # fmt: skip
#: Allowed in code: `None`, and table definitions, which must not change.
_CODE = re.compile(r"CREATE TABLE.*|``[^`]*``|`[^`]*`|\bNone\b", re.DOTALL)


def prose(page: str) -> str:
    """A page without code, link targets and generated parts; of the changelog only the unreleased part."""
    text = (ROOT / page).read_text("utf-8")
    if page == CHANGELOG:
        text = "\n## ".join(
            one for one in re.split(r"^## ", text, flags=re.MULTILINE) if "unreleased" in one[:60].lower()
        )
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^<!-- ([\w:-]+) -->$.*?^<!-- /\1 -->$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|\$\$.*?\$\$|`[^`]*`", "CODE", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def slips(text: str) -> list[str]:
    """Each banned phrase in the text, with the words around it and alternatives."""
    flat = re.sub(r"(?<!\n)\n(?![\n|#*-])[ \t]*", " ", text)
    found = [
        f"…{flat[max(hit.start() - 40, 0) : hit.end() + 20]}… ({hit[0]!r}: {instead})".replace("\n", " ")
        for pattern, instead in BANNED.items()
        for hit in re.finditer(pattern, flat, re.IGNORECASE)
    ]
    return found + [
        f"a sentence begins with {hit[1]!r}: {flat[hit.start() : hit.end() + 40]}" for hit in _SENTENCE.finditer(flat)
    ]


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string literal and docstring; inserted values become CODE."""
    tree = ast.parse(source)
    inner: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "CODE" for part in node.values]
            inner.update(ast.walk(node))
            yield node.lineno, _CODE.sub("CODE", "".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner:
            yield node.lineno, _CODE.sub("CODE", node.value)


@pytest.mark.parametrize("source", SOURCES)
def test_messages_and_docstrings_are_in_plain_english(source: str) -> None:
    found = [
        f"line {line}: {slip}"
        for line, text in texts((ROOT / source).read_text("utf-8"))
        for slip in slips(re.sub(r"\n[ \t]+(?=\S)", " ", text))
    ]
    assert not found, "\n".join([source, *found])


@pytest.mark.parametrize("file", OTHERS)
def test_templates_scripts_and_settings_are_in_plain_english(file: str) -> None:
    text = re.sub(r"`[^`\n]*`|\bnone\b(?!-)", "CODE", (ROOT / file).read_text("utf-8"))
    found = slips(re.sub(r"\n[ \t]*(?:#|//|\*)?[ \t]*(?=\S)", " ", text))
    assert not found, "\n".join([file, *found])


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_in_plain_english(page: str) -> None:
    found = slips(prose(page))
    assert not found, "\n".join([page, *found])


@pytest.mark.parametrize("file", [*PAGES, *SOURCES])
def test_an_extra_is_installed_from_a_clone(file: str) -> None:
    """There is no release on PyPI, so messages must use `cbmir.errors.installing`."""
    assert "pip install cbmir" not in (ROOT / file).read_text("utf-8").replace('"', "")


@pytest.mark.parametrize(
    "sentence",
    [
        "It takes an own table.",
        "The index is built anew.",
        "Look-alikes of other patients.",
        "Who asks for images is shown none.",
        "It is a manifest with a row an image.",
        "Only the newest release is mended.",
        "Nothing falls back in\nsilence.",
    ],
)
def test_a_slip_is_found(sentence: str) -> None:
    assert slips(sentence)
    assert not slips("It takes your own table, with one row per image. The index is rebuilt.")
