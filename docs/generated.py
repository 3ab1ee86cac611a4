"""Pages that are made from data: the config reference from the schema, compatibility from what was tested, benchmarks from results."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shadowsup.supervisor import compat
from shadowsup.supervisor.config.model import EngineKind
from shadowsup.supervisor.config.schema import json_schema

ROOT = Path(__file__).parents[1]
_MADE = "<!-- Made by docs/generated.py when the documents are built. -->\n"


def pages() -> dict[str, str]:
    """Return file name → text."""
    return {"configuration.md": configuration(), "compatibility.md": compatibility(), "benchmarks.md": benchmarks()}


def without_tree_links(text: str) -> str:
    """Turn links to files of the repository (``[words](../path)``) into words and path, which is what a reader of the site can use."""

    def plain(match: re.Match[str]) -> str:
        words, path = match[1], match[2].partition("#")[0]
        return f"`{path}`" if words.strip("`") in (path, path.rpartition("/")[2]) else f"{words} (`{path}`)"

    return re.sub(r"\[([^\]\n]+)\]\((?:\.\./|(?=examples/))([^)\s]+)\)", plain, text)


# --- the config ---------------------------------------------------------------------------------------------------------------

_ABOUT_CONFIG = """\
# Config reference

A config is one YAML file. It is strict: an unknown key, a duplicate, a tab, a wrong unit or an unset variable is an error, with file, line
and column, and all errors are told at once by `shadowsup validate CONFIG`. Editors check it while you type with the schema that
`shadowsup config schema` prints.

* **Sizes** carry a unit: `64MiB`, `2GB`. **Durations**, too: `200ms`, `1m30s`.
* **Variables**: `${NAME}` must be set, `${NAME:-default}`, `${NAME:?message}`; `$$` is a dollar sign. In scalars only.
* **Relative paths** count from the folder of the file.
* A top-level key that begins with `x-` is ignored: a place for anchors.

An annotated file with every option is printed by `shadowsup config example reference.yaml`; `shadowsup config show CONFIG` shows a config
with every default filled in.
"""


def configuration() -> str:
    """Return the reference of the config."""
    schema = json_schema()
    lines = [_MADE, _ABOUT_CONFIG]
    for title, path, section in _sections(schema):
        lines += [f"## {title}", "", str(section.get("description", "")), "", "| key | value | default | |", "|---|---|---|---|"]
        required = set(section.get("required", ()))
        for key, field in section["properties"].items():
            below = _below(schema, field)
            value = f"[section](#{_anchor(f'{path}{key}')})" if below is not None else _type(schema, field)
            default = "" if below is not None else "**required**" if key in required else _default(field)
            lines.append(f"| `{key}` | {value} | {default} | {_cell(field.get('description', ''))} |")
        lines.append("")
    lines += ["## Which engine has which keys", "", "| engine | needs | does not have |", "|---|---|---|"]
    for kind in EngineKind:
        needs, foreign = (", ".join(f"`{key}`" for key in keys) for keys in (kind.required_keys, kind.foreign_keys))
        lines.append(f"| `{kind.value}` | {needs} | {foreign} |")
    return "\n".join(lines) + "\n"


def _sections(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (heading, beginning of the path of its keys, section), each before those within it."""

    def walk(section: Mapping[str, Any], path: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        yield (f"`{path.rstrip('.')}`" if path else "The whole file"), path, section
        for key, field in section["properties"].items():
            below = _below(schema, field)
            if below is not None:
                yield from walk(below, f"{path}{key}.")

    yield from walk({**schema, "description": "The sections that there are."}, "")


def _below(schema: Mapping[str, Any], field: Mapping[str, Any]) -> Mapping[str, Any] | None:
    candidates = [field, field.get("items", {}), *field.get("anyOf", ())]
    for each in candidates:
        name = str(each.get("$ref", "")).rpartition("/")[2]
        found = schema["$defs"].get(name, {})
        if "properties" in found:
            section: Mapping[str, Any] = found
            return section
    return None


def _anchor(path: str) -> str:
    return re.sub(r"[^a-z0-9_-]", "", path.lower().replace(" ", "-"))


def _type(schema: Mapping[str, Any], field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return _type(schema, schema["$defs"][field["$ref"].rpartition("/")[2]])
    if "anyOf" in field:
        kinds = [_type(schema, each) for each in field["anyOf"] if each.get("pattern") != r"\$\{"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"] if not str(value).startswith("SIG"))
    if "const" in field:
        return f"`{json.dumps(field['const'])}`" if not isinstance(field["const"], str) else f"`{field['const']}`"
    pattern = str(field.get("pattern", ""))
    if pattern:
        return "size" if "MiB" in pattern else "rate" if " in " in pattern else "duration" if "ms" in pattern else "text"
    kind = str(field.get("type", "anything"))
    if kind == "array":
        return f"list of {_type(schema, field['items'])}"
    bounds = [f"{words} {field[name]:,}" for name, words in (("minimum", "at least"), ("maximum", "at most")) if name in field]
    names = {"integer": "whole number", "string": "text", "object": "mapping", "null": "`null`", "boolean": "`true`, `false`"}
    return names.get(kind, kind) + (f", {', '.join(bounds)}" if bounds else "")


def _default(field: Mapping[str, Any]) -> str:
    return f"`{json.dumps(field['default'], ensure_ascii=False)}`".replace('"', "") if "default" in field else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|").replace("<", r"\<").replace("*", r"\*")


# --- what was tested ------------------------------------------------------------------------------------------------------------

_ABOUT_COMPATIBILITY = """\
# Compatibility

What the tests were run with. Outside a range nothing is refused but what cannot work: it has not been tried. `shadowsup doctor` compares
what is installed with the same table.

| | tested | for |
|---|---|---|
"""

_ENGINES = """
## What each engine keeps

| | `transformers` | `loop` | `vllm` | `command` |
|---|---|---|---|---|
| supervised, replaced, routed to | yes | yes | yes | yes |
| weights outlive the process | yes | yes | yes | no |
| KV blocks and their index outlive the process | yes | yes | yes | no |
| parked shadow | yes | yes | yes | no |
| a stream goes on after a death | yes | yes | yes | no: the client gets an error event |
| CPU | yes | yes | build for the CPU | as the program does |

## Systems

* Linux 5.4 or newer: pidfds, sealed memfds and OFD locks are used and have no substitute. x86-64 and arm64.
* NVIDIA GPUs whose driver exports memory as file descriptors (data-centre and desktop GPUs; not vGPU, not WSL). Compute mode Default, MPS
  off. MIG: one instance for each node.
* Without a GPU everything runs on the CPU, over main memory.
* In containers: pidfds must be allowed by the seccomp profile (Docker 20.10 and newer do), and see
  [Moving from Docker](migrating.md#from-docker).
"""


def compatibility() -> str:
    """Return the table of what was tested."""
    rows = [f"| {one.name} | {one.span} | {one.role} |" for one in compat.TABLE]
    return _MADE + _ABOUT_COMPATIBILITY + "\n".join(rows) + "\n" + _ENGINES


# --- benchmarks -----------------------------------------------------------------------------------------------------------------

_ABOUT_BENCHMARKS = """\
# Benchmarks

Made from `benchmarks/results/*.json`, the same figures as in the README. What each figure means, and what it does not, is said in
`benchmarks/README.md` of the repository; the commands that measure them on your machine are `shadowsup bench failover` and its siblings
([the command line](cli.md#drill)).
"""


def benchmarks() -> str:
    """Return the tables of every result."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import report
    finally:
        sys.path.pop(0)
    results = ROOT / "benchmarks" / "results"
    text = report.block(report.documents(results)) + report.gpu_block(report.documents(results, report.GPU_ORDER))
    text += report.vllm_block(report.documents(results, report.VLLM_ORDER))
    # The introductions of the README's blocks link to files of the repository.
    text = re.sub(r"\[([^\]]+)\]\(benchmarks/[^)]+\)", r"`\1`", text)
    return _MADE + _ABOUT_BENCHMARKS + re.sub(r"^### ", "## ", text, flags=re.MULTILINE)
