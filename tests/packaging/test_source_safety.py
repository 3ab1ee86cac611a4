"""What must not be in the source: ways to run what somebody else wrote into a file or a message."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("shadowsup", "supervisor", "memkeeper", "workers", "tui", "benchmarks")
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "xmlrpc", "telnetlib"}
UNSAFE_CALLS = {
    "eval": "runs text",
    "exec": "runs text",
    "os.system": "a shell",
    "os.popen": "a shell",
    "yaml.load": "makes objects; safe_load does not",
    "yaml.unsafe_load": "makes objects",
    "torch.load": "unpickles",
    "torch.save": "pickles",
    "np.load": "may unpickle",
    "numpy.load": "may unpickle",
    "tempfile.mktemp": "a name that somebody else may take",
}
UNSAFE_WORDS = {"shell", "allow_pickle", "trust_remote_code"}
"""Keyword arguments that must not be True."""


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def findings(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"{node.lineno}: imports {name}" for name in names if name.split(".")[0] in UNSAFE_MODULES]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in UNSAFE_CALLS:
                found.append(f"{node.lineno}: {called}: {UNSAFE_CALLS[called]}")
            if called.endswith((".send_pyobj", ".recv_pyobj")):
                found.append(f"{node.lineno}: {called} pickles")
            for keyword in node.keywords:
                if keyword.arg in UNSAFE_WORDS and isinstance(keyword.value, ast.Constant) and keyword.value.value:
                    found.append(f"{node.lineno}: {called}({keyword.arg}=True)")
    return found


def test_nothing_is_unpickled_evaluated_or_given_to_a_shell() -> None:
    assert len(sources()) > 150
    found = [f"{path.relative_to(ROOT)}:{what}" for path in sources() for what in findings(ast.parse(path.read_text()))]
    assert found == []


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from pickle import loads", "eval(x)", "sock.recv_pyobj()", "run(x, shell=True)", "torch.load(x)", "os.system(x)"],
)
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert len(findings(ast.parse(text))) == 1
