"""Hooks for building the site (`hooks` in mkdocs.yml).

Pages are written for GitHub, where a list or table may directly follow a paragraph; Python-Markdown needs a blank line
between them. Equations become MathML, a docstring's "::" is removed, and notebooks become pages.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

#: Equations in arithmatex's output: \(inline\) and \[on their own line\].
_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
#: A docstring's "::" before an indented block, which Markdown turns into a paragraph and a code block.
_LITERAL_MARK = re.compile(r"<p>::</p>\n?")
_LIST = re.compile(r"(?:[-*]|\d+\.) ")
#: A line that includes a page from the top of the repository.
_INCLUDED = re.compile(r'^--8<-- "(\w+\.md)"$', re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in [one for one in files if one.src_uri.endswith(".ipynb")]:
        files.remove(file)
        files.append(File.generated(config, file.src_uri[:-5] + "md", content=_notebook(file.content_string)))
    return files


def _notebook(text: str) -> str:
    """Convert a notebook's cells to Markdown, each followed by its output."""
    parts: list[str] = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if picture := output.get("data", {}).get("image/png"):
                parts.append(f'<img alt="What the cell draws" src="data:image/png;base64,{picture.strip()}">')
            elif printed := "".join(output.get("text", ())).rstrip():
                parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Add blank lines around tables and before lists, except in fenced code. Missing screenshots are left out."""
    markdown = _INCLUDED.sub(_page_at_the_top, markdown).replace(".ipynb)", ".md)")
    apart: list[str] = []
    fenced = False
    before = ""
    for line in markdown.split("\n"):
        if (shot := re.search(r"^!.*\((demo/.*?)\)", line)) and not (Path(__file__).parent / shot[1]).exists():
            continue
        if not fenced and line and before and _begins_or_ends(before, line):
            apart.append("")
        if line.startswith("```"):
            fenced = not fenced
        apart.append(line)
        before = line
    return "\n".join(apart)


def _page_at_the_top(named: re.Match[str]) -> str:
    """Read a page such as CHANGELOG.md, with links made relative to docs/."""
    return (Path(__file__).parents[1] / named[1]).read_text("utf-8").replace("](docs/", "](")


def _begins_or_ends(before: str, line: str) -> bool:
    """Return whether a table begins or ends, or a list begins, between two lines."""
    if before.startswith("|") != line.startswith("|"):
        return True
    in_list = before.startswith(" ") or _LIST.match(before) is not None
    return _LIST.match(line) is not None and not in_list


def on_page_content(content: str, **_: Any) -> str:
    """Convert LaTeX to MathML, which browsers render without scripts or fonts."""
    return _EQUATION.sub(_mathml, _LITERAL_MARK.sub("", content))


def _mathml(equation: re.Match[str]) -> str:
    tag, latex = equation.groups()
    display = "block" if tag == "div" else "inline"
    return f'<{tag} class="equation">{convert(html.unescape(latex).strip(), display=display)}</{tag}>'
