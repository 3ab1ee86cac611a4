"""``python:`` another interpreter: our engine side on its path, and nothing else of our environment."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import shadowsup
import shadowsup.memkeeper
import shadowsup.wire
import shadowsup.workers
from shadowsup.supervisor.errors import SupervisorError

PYPATH = "pypath"
"""The folder, in the runtime directory."""

MIN_PYTHON = (3, 11)

REQUIRED = ("zmq", "msgspec", "numpy")
"""What the engine side needs besides the standard library."""

_PLUGIN = {
    "METADATA": "Metadata-Version: 2.1\nName: shadowsup-vllm\nVersion: 1\n",
    "entry_points.txt": "[vllm.general_plugins]\nshadowsup = shadowsup.workers.vllm.plugin:register\n",
}
"""Nothing is installed into an environment of the user's: the plugin is found on the path that its engines are given."""

_PACKAGE_OF = {"zmq": "pyzmq"}

# One line of JSON, after whatever a site hook prints. find_spec imports nothing: a broken torch must not fail this.
_ASK = """
import importlib.util, json, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(); print(json.dumps({"executable": sys.executable, "version": list(sys.version_info[:3]), "missing": missing}))
"""


def make_pypath(runtime_dir: Path) -> Path:
    """Create ``runtime_dir/pypath`` with links to the engine side of this package; return it, to be PYTHONPATH. Idempotent.

    Putting our site-packages there instead would shadow the other environment's own packages with ours. Set PYTHONSAFEPATH=1 with it:
    ``-m`` puts the working folder in front of the path otherwise, and what lies there is anyone's.

    Raises:
        SupervisorError: it cannot be written.
    """
    root = _folder(shadowsup)
    parts = {
        "__init__.py": root / "__init__.py",
        "errors.py": root / "errors.py",
        "robust_mutex.py": root / "robust_mutex.py",
        "wire": _folder(shadowsup.wire),
        "memkeeper": _folder(shadowsup.memkeeper),
        "workers": _folder(shadowsup.workers),
    }
    pypath = runtime_dir / PYPATH
    package = pypath / "shadowsup"
    try:
        package.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, target in parts.items():
            link = package / name
            if link.is_symlink() and link.readlink() == target:
                continue
            # Renamed over an old one: an engine that starts just now finds one or the other.
            temporary = package / f".{name}.{os.getpid()}"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target)
            temporary.rename(link)
        _announce_plugin(pypath)
    except OSError as error:
        raise SupervisorError(f"cannot make {pypath}: {error.strerror}", "is the runtime directory writable?") from error
    return pypath


def _announce_plugin(pypath: Path) -> None:
    """Let vLLM find our plugin there, as if it were installed: what importlib.metadata reads of a distribution."""
    info = pypath / "shadowsup_vllm-1.dist-info"
    info.mkdir(mode=0o700, exist_ok=True)
    for name, text in _PLUGIN.items():
        if not (info / name).exists():
            temporary = info / f".{name}.{os.getpid()}"
            temporary.write_text(text)
            temporary.rename(info / name)


@dataclass(frozen=True, kw_only=True)
class PythonInfo:
    """``executable`` as the interpreter itself names it."""

    executable: str
    version: tuple[int, int, int]


def check_python(path: str, modules: tuple[str, ...] = REQUIRED, *, timeout_s: float = 30.0) -> PythonInfo:
    """Run the interpreter once and say what it is. Blocking, some 50 ms; more on a cold network disk.

    Raises:
        SupervisorError: not there, not a Python, older than `MIN_PYTHON`, or ``modules`` are missing (the hint has the remedy).
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        # -I would hide packages of the user's site, which the engine will see.
        done = subprocess.run([path, "-c", _ASK, *modules], capture_output=True, env=environment, timeout=timeout_s, check=False)
    except FileNotFoundError as error:
        raise SupervisorError(f"there is no Python at {path}", "python: must be the path of an interpreter, as ENV/bin/python") from error
    except subprocess.TimeoutExpired as error:
        raise SupervisorError(f"{path} did not answer within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise SupervisorError(f"{path} cannot be run: {getattr(error, 'strerror', None) or error}") from error
    answer = None
    with contextlib.suppress(ValueError, IndexError):
        answer = json.loads(done.stdout.decode(errors="replace").splitlines()[-1])
    if done.returncode != 0 or not isinstance(answer, dict):
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SupervisorError(f"{path} is not a working Python" + (f": {said}" if said else f" (exit status {done.returncode})"))
    major, minor, micro = answer["version"]
    if (major, minor) < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        raise SupervisorError(f"{path} is Python {major}.{minor}.{micro}", f"engines need Python {wanted} or newer")
    if missing := [_PACKAGE_OF.get(name, name) for name in answer["missing"]]:
        raise SupervisorError(f"{path} has no {', '.join(missing)}", f"{path} -m pip install {' '.join(missing)}")
    return PythonInfo(executable=answer["executable"], version=(major, minor, micro))


def _folder(module: object) -> Path:
    file = getattr(module, "__file__", None)
    assert isinstance(file, str), "a package of ours has an __init__.py"
    return Path(file).resolve().parent
