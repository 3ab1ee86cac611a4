"""A file's text → `Document`. Goes on after a tab, so that one run shows everything that is wrong; other syntax errors end it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from yaml.error import MarkedYAMLError
from yaml.nodes import Node
from yaml.reader import ReaderError

from shadowsup.supervisor.config.document import Document, Loader, Mark, Walk

MAX_TEXT = 1_000_000
"""Characters. A config is a few KB."""

_TAB_WIDTHS = (2, 4, 8, 1)
_MAX_TABS = 100
"""The text is composed anew after each."""
_HINTS = {
    "mapping values are not allowed here": "write KEY: VALUE on a line of its own, or put a value that has ': ' in it in quotes",
    "could not find expected ':'": "write KEY: VALUE, with a space after the colon",
    "found unexpected end of stream": "a quote or bracket is not closed",
    "expected <block end>": "keys of one mapping start in the same column; a value that starts with [ and goes on after ] needs quotes",
    "expected ',' or": "a bracket is not closed, or a comma is missing",
    "expected the node content": "a value is missing, or one that has : or ] in it needs quotes",
    "cannot start any token": "put the value in quotes",
    "expected alphabetic or numeric character": "put the value in quotes",
    "found undefined alias": "define it with &name before it is used",
    "expected a single document": "a config is one document; remove ---",
    "unknown escape character": "in double quotes \\ starts an escape; use single quotes",
}


class _Text:
    """The text as it is composed: tabs replaced by spaces. Knows where each place is in the file."""

    def __init__(self, text: str, tab_width: int) -> None:
        self.text = text
        self._width = tab_width
        self._shift: dict[int, list[tuple[int, int]]] = {}
        """Line → (column where the tab stood in the composed text, columns added)."""

    @property
    def tabs(self) -> int:
        """How many were replaced."""
        return sum(len(tabs) for tabs in self._shift.values())

    def replace_tab(self, index: int) -> Mark:
        """Replace the tab at ``index`` and return its position in the file."""
        mark = self.position(index)
        start = self.text.rfind("\n", 0, index) + 1
        leading = not self.text[start:index].strip()
        spaces = self._width if leading else 1
        self.text = f"{self.text[:index]}{' ' * spaces}{self.text[index + 1 :]}"
        self._shift.setdefault(mark.line, []).append((index - start, spaces - 1))
        return mark

    def position(self, index: int) -> Mark:
        line = self.text.count("\n", 0, index) + 1
        column = index - (self.text.rfind("\n", 0, index) + 1)
        for at, added in reversed(self._shift.get(line, [])):
            if column > at:
                column = max(at, column - added)
        return Mark(line, column + 1)


def readings(text: str, file: str, environ: Mapping[str, str]) -> Iterator[Document]:
    """Yield the document of ``text``; where tabs indent it, once for each width a tab may have been meant to have.

    What is wrong is in ``problems``; ``data`` is None when the text cannot be read at all.
    """
    if len(text) > MAX_TEXT:
        document = Document(file)
        document.problem((), f"the file has more than {MAX_TEXT} characters")
        yield document
        return
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    for width in _TAB_WIDTHS:
        document, source = Document(file), _Text(text, width)
        composed, node = _compose(source, document)
        if node is not None:
            document.data = Walk(document, source.text, environ, source.position).value(node, ())
        if composed and document.data is None and not document.problems:
            document.problem((), "the file is empty", "shadowsup config schema describes what goes in")
        yield document
        if not source.tabs:
            return


def _compose(source: _Text, document: Document) -> tuple[bool, Node | None]:
    """Compose, replacing each tab that stops the scanner. Return (whether it worked, the root)."""
    while True:
        loader = None
        try:
            loader = Loader(source.text)
            node: Node | None = loader.get_single_node()
            return True, node
        except ReaderError as error:
            mark = source.position(error.position)
            code = ord(error.character) if isinstance(error.character, str) else error.character
            document.problem((), f"character U+{code:04X} is not allowed", mark=mark)
            return False, None
        except MarkedYAMLError as error:
            at = error.problem_mark or error.context_mark
            index = at.index if at is not None else 0
            tab = _tab_at(source.text, index)
            if tab is not None and source.tabs < _MAX_TABS:
                document.problem((), "a tab; YAML is indented with spaces", "replace it by spaces", mark=source.replace_tab(tab))
                continue
            message = ", ".join(part for part in (error.context, error.problem) if part) or "not YAML"
            hint = next((hint for part, hint in _HINTS.items() if part in message), "")
            if "$" in _line(source.text, index) and "flow" in message:
                hint = 'inside { } and [ ] write variables in quotes: "${VAR}"'
            document.problem((), f"not valid YAML: {message}", hint, mark=source.position(index))
            return False, None
        except RecursionError:
            document.problem((), "the document is nested too deeply")
            return False, None
        finally:
            if loader is not None:
                loader.dispose()


def _line(text: str, index: int) -> str:
    start = text.rfind("\n", 0, index) + 1
    end = text.find("\n", index)
    return text[start : end if end >= 0 else len(text)]


def _tab_at(text: str, index: int) -> int | None:
    """Return the place of the tab that the scanner stumbled over: at ``index``, or in the indentation of that line."""
    if text[index : index + 1] == "\t":
        return index
    start = text.rfind("\n", 0, index) + 1
    for place in range(start, len(text)):
        if text[place] == "\t":
            return place
        if text[place] != " ":
            return None
    return None
