"""What MkDocs needs to make a book of docs/ and of the pages in the repository's root.

On GitHub, pages link to each other and to source files by relative paths, inside and outside of
docs/. In the book, the pages of the root are chapters (README.md is its first), and a source file
that a page links to is a page of its own, so every link works in both places.
"""

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LANGUAGES = {".rs": "rust", ".h": "c", ".cuh": "c++", ".cu": "c++", ".py": "python", ".toml": "toml"}
# A link or an image outside of code: [text](target) or ![text](target), with an optional anchor.
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
# The target of links [text][label], on a line of its own: [label]: target
DEFINITION = re.compile(r"^(\[[^\]]+\]: )([^\s#]+)(#\S*)?()$")
FENCE = re.compile(r"^\s*```")
log = logging.getLogger("mkdocs.hooks.book")


def on_files(files, config):
    for path, chapter in CHAPTERS.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, chapter, content=relinked(text, path, chapter)))
    pages = {file.src_uri: f"docs/{file.src_uri}" for file in files if not file.generated_by}
    pages |= {chapter: path for path, chapter in CHAPTERS.items()}
    for path in sorted(sources(pages)):
        files.append(File.generated(config, f"source/{path}.md", content=source_page(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.generated_by:
        return markdown
    return relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def sources(pages):
    """The files outside of docs/ that the pages link to."""
    found = set()
    for path in pages.values():
        if path.endswith(".md"):
            for target in targets((ROOT / path).read_text(encoding="utf-8")):
                full = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
                if not full.startswith("docs/") and full not in CHAPTERS and (ROOT / full).is_file():
                    found.add(full)
    return found


def targets(text):
    found = []
    each_link(text, lambda target, anchor: found.append(target))
    return [target for target in found if "://" not in target]


def each_link(text, change):
    """The text with the targets of links outside of code blocks replaced by what `change` returns,
    unless that is None."""

    def changed(match):
        target = change(match[2], match[3] or "")
        return match[0] if target is None else match[1] + target + match[4]

    lines, in_code = [], False
    for line in text.splitlines():
        in_code ^= bool(FENCE.match(line))
        if not in_code:
            line = DEFINITION.sub(changed, LINK.sub(changed, line))
        lines.append(line)
    return "\n".join(lines) + "\n"


def relinked(text, path, chapter):
    """A page of the repository at `path`, with links that hold where the book has it: `chapter`."""

    def change(target, anchor):
        if "://" in target:
            return None
        full = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if full in CHAPTERS:
            place = CHAPTERS[full]
        elif full.startswith("docs/"):
            place = full.removeprefix("docs/")
        elif (ROOT / full).is_file():
            place, anchor = f"source/{full}.md", ""
        else:
            log.warning("%s links to %s, which does not exist or is a folder", path, target)
            return None
        return posixpath.relpath(place, posixpath.dirname(chapter) or ".") + anchor

    return each_link(text, change)


def source_page(path):
    language = LANGUAGES.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    fence = "````" if "```" in text else "```"
    return f"# {path}\n\n{fence} {language}\n{text}\n{fence}\n"
