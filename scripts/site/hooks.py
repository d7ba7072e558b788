"""What mkdocs.yml cannot say: the README as the first page, notebooks, links out of docs/, formulas, and the reference from docstrings.

The pages are written for a code host, where ``../src/groupwise/types.py`` and ``$x$`` simply work. Here the files that pages link to become
part of the site, and formulas become MathML, so that the site needs no other host and opens from disk.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "modules_with_words", "notebook_page", "on_config", "on_files", "on_page_markdown", "outside_links", "rewritten", "with_formulas",
]  # fmt: skip

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RENAMED: Mapping[str, str] = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the site that stand outside docs/ under another name; others keep theirs."""
FOLDERS: Mapping[str, str] = {
    "tutorials": "Tutorials", "how-to": "How-to guides", "reference": "Reference", "explanation": "Explanation",
}  # fmt: skip
"""Folders of docs/ and the sections of the navigation."""
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
MATH_FENCE = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOTEBOOK_MATH = re.compile(r"^\$\$(.+?)\$\$$", re.MULTILINE | re.DOTALL)
INLINE_MATH = re.compile(r"(?<![\w$\\])\$([^\s$](?:[^$\n]*[^\s$])?)\$(?![\w$])")


def on_config(config: Any) -> Any:
    """The navigation gets each notebook, algorithm and module, and the pages of docs/ that it does not name, by their folders."""
    named = set(re.findall(r"[\w./+-]+\.md", str(config["nav"])))
    pages = (path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))
    further = [page for page in pages if page not in named]
    sections = {title: entries for section in config["nav"] for title, entries in section.items()}
    sections["Tutorials"] += [site_uri(file) for file in sorted(linked_files()) if file.endswith(".ipynb")]
    for folder, title in FOLDERS.items():
        sections[title] += [page for page in further if page.startswith(f"{folder}/") and page.count("/") == 1]
    sections["Explanation"] += [page for page in further if "/" not in page]
    sections["Reference"] += [
        {"Algorithms": [page for page in further if page.startswith("reference/algorithms/")]},
        {"Modules": [{room: f"modules/{room}.md"} for room in modules_with_words()]},
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for asset in ("site.css", "iframe-worker.js"):
        files.append(File.generated(config, f"assets/{asset}", abs_src_path=str(HERE / asset)))
    for source in sorted(linked_files()):
        if source.endswith(".ipynb"):
            files.append(File.generated(config, site_uri(source), content=notebook_page(source)))
            files.append(File.generated(config, source, abs_src_path=str(ROOT / source)))
        else:
            files.append(File.generated(config, site_uri(source), abs_src_path=str(ROOT / source)))
    for room, modules in modules_with_words().items():
        files.append(File.generated(config, f"modules/{room}.md", content=module_page(room, modules)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    if uri.startswith("modules/"):
        return markdown
    notebook = uri.removesuffix(".md") + ".ipynb"
    if notebook in linked_files():
        return with_formulas(rewritten(notebook, uri, markdown) + f"\n\n[The notebook itself]({posixpath.basename(notebook)})\n")
    source = RENAMED.get(uri, uri if uri in linked_files() else f"docs/{uri}")
    return with_formulas(rewritten(source, uri, markdown))


@cache
def linked_files() -> frozenset[str]:
    """Files outside docs/ that belong to the site: the README, and whatever pages link to, pages among those included."""
    waiting = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")] + list(RENAMED.values())
    found = set(RENAMED.values())
    while waiting:
        source = waiting.pop()
        words = notebook_page(source) if source.endswith(".ipynb") else (ROOT / source).read_text(encoding="utf-8")
        for target in outside_links(source, words):
            if target not in found:
                found.add(target)
                waiting += [target] if target.endswith((".md", ".ipynb")) else []
    return frozenset(found)


def site_uri(source: str) -> str:
    """Where a file of the repository stands in the site, docs/ being the site's root. A notebook is a page there."""
    if source.endswith(".ipynb"):
        return source.removesuffix(".ipynb") + ".md"
    return {file: page for page, file in RENAMED.items()}.get(source, source.removeprefix("docs/"))


def outside_links(source: str, markdown: str) -> Iterator[str]:
    """Files of the repository outside docs/ that the page ``source`` links to."""
    for piece in relinkable(FENCE.split(markdown))[::2]:
        for _, link in LINK.findall(piece):
            target = repository_path(source, link)
            if target and not target.startswith("docs/") and (ROOT / target).is_file():
                yield target


def repository_path(source: str, link: str) -> str | None:
    """Where a relative link leads, from the repository's root; ``None`` for other hosts and for anchors of the same page."""
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))


def rewritten(source: str, uri: str, markdown: str) -> str:
    """The page with its links as they are in the site, where docs/ is the root."""

    def relink(match: re.Match[str]) -> str:
        target = repository_path(source, match[2])
        if target is None:
            return match[0]
        _, hash_mark, anchor = match[2].partition("#")
        return f"{match[1]}({posixpath.relpath(site_uri(target), posixpath.dirname(uri) or '.')}{hash_mark}{anchor})"

    pieces = FENCE.split(markdown)
    return "".join(piece if i % 2 else LINK.sub(relink, piece) for i, piece in enumerate(relinkable(pieces)))


def relinkable(pieces: list[str]) -> list[str]:
    """Text and code in turns. A link whose words are code (``[`x`](y)``) is cut in two by that; such code is put back into text."""
    joined = [pieces[0]]
    for code, text in zip(pieces[1::2], pieces[2::2], strict=True):
        if joined[-1].endswith("[") and text.startswith("]("):
            joined[-1] += code + text
        else:
            joined += [code, text]
    return joined


def with_formulas(markdown: str) -> str:
    from latex2mathml.converter import convert

    def block(match: re.Match[str]) -> str:
        return f'<div class="arithmatex" style="overflow-x: auto">{convert(match[1].strip(), display="block")}</div>'

    pieces = FENCE.split(MATH_FENCE.sub(block, markdown))
    return "".join(piece if i % 2 else INLINE_MATH.sub(lambda m: convert(m[1]), piece) for i, piece in enumerate(pieces))


def modules_with_words() -> dict[str, list[str]]:
    """Public modules (those with an ``__all__`` and a docstring) of each room of the package, by name."""
    rooms: dict[str, list[str]] = {}
    package = ROOT / "src" / "groupwise"
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = any(isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__" for node in tree.body)
        if parts[0] in ("cli", "__main__") or parts[-1] == "__init__" or not named or ast.get_docstring(tree) is None:
            continue
        rooms.setdefault(parts[0], []).append(".".join(("groupwise", *parts)))
    return rooms


def notebook_page(source: str) -> str:
    """A notebook's cells as Markdown, code and formulas in fences."""
    cells = json.loads((ROOT / source).read_text(encoding="utf-8"))["cells"]
    pieces = ("".join(cell["source"]) for cell in cells)
    return "\n\n".join(
        f"```python\n{text}\n```" if cell["cell_type"] == "code" else NOTEBOOK_MATH.sub(r"```math\n\1\n```", text)
        for cell, text in zip(cells, pieces, strict=True)
    )


def module_page(room: str, modules: list[str]) -> str:
    return "\n".join([f"# groupwise.{room}", "", *(f"::: {module}\n" for module in modules)])
