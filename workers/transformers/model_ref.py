"""Model references: what a config's ``model:`` may say, and which files that is on this machine.

=============================  ====================================================================================
``package:PKG/FILE``           a file or folder inside an installed Python package, which is found but not imported
a folder                       ``config.json`` and ``*.safetensors``
``FILE.gguf``                  one GGUF file, tokenizer included
``FILE.safetensors``           its folder
``ORG/NAME``                   a Hugging Face repository, from the local cache (`shadowsup.workers.transformers.fetch` fills it)
``ORG/NAME/FILE.gguf``         one GGUF file of a repository
``dummy:NAME``                 no files: random weights (``load_format: dummy`` with ``config``)
=============================  ====================================================================================
"""

from __future__ import annotations

import enum
import hashlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shadowsup.workers.errors import WorkerError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SAMPLED = 1024 * 1024
"""Bytes hashed at each end of a weight file: enough to tell files apart, cheap enough for every start."""
_SMALL = ("*.json", "*.jinja", "*.model")


class RefKind(enum.Enum):
    LOCAL = "local"
    HUB = "hub"
    DUMMY = "dummy"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's files are. ``folder`` None: there are none (dummy). ``gguf``: name of the GGUF file in ``folder``, or None.

    ``revision``: commit hash of a hub repository, else None.
    """

    ref: str
    kind: RefKind
    folder: Path | None
    gguf: str | None = None
    revision: str | None = None

    @property
    def path(self) -> str:
        """The one path that names the model; empty for dummy."""
        if self.folder is None:
            return ""
        return str(self.folder / self.gguf) if self.gguf else str(self.folder)

    def weight_files(self) -> list[Path]:
        """Return the files that hold weights, by name."""
        if self.folder is None:
            return []
        return [self.folder / self.gguf] if self.gguf else sorted(self.folder.glob("*.safetensors"))

    def digest(self) -> str:
        """Return a digest of the weight files' names, sizes, times and ends, and of the small files that are kept with them.

        For a pinned commit there is nothing to look at.
        """
        if self.revision is not None:
            return "commit"
        state = hashlib.sha256()
        if self.folder is not None and self.gguf is None:
            for name in sorted(file.name for pattern in _SMALL for file in self.folder.glob(pattern)):
                state.update(f"{name}\0".encode() + (self.folder / name).read_bytes())
        for file in self.weight_files():
            stat = file.stat()
            state.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
            with file.open("rb") as source:
                state.update(source.read(_SAMPLED))
                source.seek(max(0, stat.st_size - _SAMPLED))
                state.update(source.read(_SAMPLED))
        return state.hexdigest()[:32]


HubLookup = Callable[[str, str | None, str | None], Path]
"""(repository, revision, GGUF file or None) → its snapshot folder."""


def resolve(ref: str, revision: str | None, hub: HubLookup) -> ModelFiles:
    """Return the files behind ``ref``; reads folders, no weights.

    Args:
        hub: finds a repository's snapshot: in the cache (engines), or by downloading (fetch).

    Raises:
        WorkerError: (fatal) there is no such model here; the message says what was looked for and where.
    """
    if not ref.strip():
        raise WorkerError("no model is named", "set model: in the worker's config", fatal=True)
    if ref == "dummy" or ref.startswith("dummy:"):
        return ModelFiles(ref, RefKind.DUMMY, None)
    if ref.startswith("package:"):
        _no_revision(ref, revision)
        return _local(ref, _in_package(ref))
    path = Path(ref).expanduser()
    if ref.startswith(("/", "./", "../", "~")) or path.exists():
        _no_revision(ref, revision)
        return _local(ref, path)
    repository, gguf = ref, None
    if ref.endswith(".gguf") and ref.count("/") >= 2:
        org, name, gguf = ref.split("/", 2)
        repository = f"{org}/{name}"
    if not _HUB_ID.fullmatch(repository) or repository.endswith((".gguf", ".safetensors")):
        raise WorkerError(
            f"model {ref!r} is no file here and no repository's name",
            "use package:PKG/FILE, an absolute path, or ORG/NAME",
            fatal=True,
        )
    folder = hub(repository, revision, gguf)
    if gguf is None:
        _check_folder(ref, folder)
    elif not (folder / gguf).is_file():
        raise WorkerError(f"repository {repository} has no file {gguf}", fatal=True)
    # Snapshots lie in a folder that is named after their commit.
    return ModelFiles(ref, RefKind.HUB, folder, gguf, folder.name)


def _no_revision(ref: str, revision: str | None) -> None:
    if revision is not None:
        raise WorkerError(f"revision {revision!r} has no meaning for the local model {ref}", "remove revision:", fatal=True)


def _in_package(ref: str) -> Path:
    package, _, inner = ref.removeprefix("package:").partition("/")
    if not package.isidentifier():
        raise WorkerError(f"{ref!r} does not name a Python package", "write package:PKG/FILE", fatal=True)
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise WorkerError(
            f"package {package} of model {ref} is not installed", "install it into this Python, or correct the name", fatal=True
        )
    # Namespace packages may have several folders.
    for location in spec.submodule_search_locations:
        root = Path(location).resolve()
        path = (root / inner).resolve()
        if not path.is_relative_to(root):
            raise WorkerError(f"model {ref} leads out of its package", fatal=True)
        if path.exists():
            return path
    files = sorted(file.name for location in spec.submodule_search_locations for file in Path(location).glob("*.gguf"))
    raise WorkerError(f"package {package} has no {inner or 'file named'}", f"it has {', '.join(files)}" if files else "", fatal=True)


def _local(ref: str, path: Path) -> ModelFiles:
    if not path.exists():
        raise WorkerError(f"model {ref} does not exist ({path})", "correct the path", fatal=True)
    if path.is_dir():
        _check_folder(ref, path)
        return ModelFiles(ref, RefKind.LOCAL, path)
    if path.suffix == ".gguf":
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise WorkerError(f"model {ref} is not a GGUF file: it does not begin with GGUF", "download it again", fatal=True)
        return ModelFiles(ref, RefKind.LOCAL, path.parent, path.name)
    if path.suffix == ".safetensors":
        _check_folder(ref, path.parent)
        return ModelFiles(ref, RefKind.LOCAL, path.parent)
    raise WorkerError(f"model {ref} is of an unknown kind", "name a folder, a .gguf file or a .safetensors file", fatal=True)


def _check_folder(ref: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise WorkerError(f"model {ref} has no config.json ({folder})", "name the folder that has it, or a .gguf file in it", fatal=True)
    if not any(folder.glob("*.safetensors")):
        raise WorkerError(f"model {ref} has no *.safetensors ({folder})", "convert its weights to safetensors", fatal=True)
