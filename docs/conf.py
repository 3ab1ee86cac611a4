"""The documents' site: ``sphinx-build -W docs docs/_build``. Pages that only repeat what is elsewhere are made here, at each build."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
ROOT = HERE.parent
try:
    import shadowsup.supervisor  # noqa: F401
except ImportError:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT / ".typing"))
    importlib.invalidate_caches()
sys.path.insert(0, str(HERE))

import generated  # noqa: E402

from shadowsup import __version__  # noqa: E402

project = "shadowsup"
author = "the shadowsup authors"
copyright = "the shadowsup authors"
version = release = __version__

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist", "attrs_block"]
myst_heading_anchors = 4
exclude_patterns = ["_build", "examples"]
html_theme = "furo"
html_title = f"shadowsup {__version__}"
html_static_path = ["_static"]
html_theme_options = {"source_directory": "docs/"}
# A page of its own accord need not be in a list: what the index does not name is put under "More".
suppress_warnings = ["myst.header"]


def _make_pages(app: Sphinx) -> None:
    for name, text in generated.pages().items():
        path = HERE / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _list_the_rest(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put every page that the index does not name where it says ``@@more@@``."""
    if docname == "index":
        named = set(source[0].split())
        rest = sorted(path.stem for path in HERE.glob("*.md") if path.stem != "index" and path.stem not in named)
        source[0] = source[0].replace("@@more@@", "\n".join(rest))


def _link_to_the_tree(app: Sphinx, docname: str, source: list[str]) -> None:
    """What a page calls ``../x`` is a file of the repository and not of the site: shown as its path."""
    source[0] = generated.without_tree_links(source[0])


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", _make_pages, priority=100)
    app.connect("source-read", _list_the_rest)
    app.connect("source-read", _link_to_the_tree)
