"""Model references: what each form means, and a clear word at once for a wrong one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.transformers import fetch, hub
from shadowsup.workers.transformers.model_ref import RefKind, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def no_hub(repository: str, revision: str | None, gguf: str | None) -> Path:
    raise AssertionError(f"{repository} is not for the hub")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"12345678")
    (model / "small.gguf").write_bytes(b"GGUF....")
    return model


@pytest.fixture
def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that must be found, and must not be imported."""
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    folder.rename(folder.parent / "some_model_package")
    monkeypatch.syspath_prepend(str(folder.parent))
    return "some_model_package"


def test_a_folder_a_gguf_file_and_a_safetensors_file(folder: Path) -> None:
    whole = resolve(str(folder), None, no_hub)
    assert (whole.kind, whole.folder, whole.gguf, whole.path) == (RefKind.LOCAL, folder, None, str(folder))
    assert [file.name for file in whole.weight_files()] == ["model.safetensors"]
    gguf = resolve(str(folder / "small.gguf"), None, no_hub)
    assert (gguf.folder, gguf.gguf, gguf.path) == (folder, "small.gguf", str(folder / "small.gguf"))
    assert resolve(str(folder / "model.safetensors"), None, no_hub).folder == folder


def test_a_package_is_found_and_not_imported(package: str) -> None:
    found = resolve(f"package:{package}/small.gguf", None, no_hub)
    assert found.gguf == "small.gguf" and package not in sys.modules
    with pytest.raises(WorkerError, match=r"has no other\.gguf") as refused:
        resolve(f"package:{package}/other.gguf", None, no_hub)
    assert "small.gguf" in refused.value.hint
    with pytest.raises(WorkerError, match="leads out"):
        resolve(f"package:{package}/../x.gguf", None, no_hub)


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("", "no model"),
        ("/nowhere/model", "does not exist"),
        ("./nowhere.gguf", "does not exist"),
        ("nowhere.gguf", "no file here"),
        ("a b c", "no file here"),
        ("package:no_such_package_here/x.gguf", "not installed"),
        ("package:/x.gguf", "does not name a Python package"),
        ("package:no/such.pkg/x", "not installed"),
    ],
)
def test_a_wrong_reference_is_a_clear_error(ref: str, words: str) -> None:
    with pytest.raises(WorkerError, match=words) as refused:
        resolve(ref, None, no_hub)
    assert refused.value.fatal


def test_files_that_cannot_be_a_model_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(WorkerError, match=r"no config\.json"):
        resolve(str(tmp_path), None, no_hub)
    (folder / "broken.gguf").write_bytes(b"<html>")
    with pytest.raises(WorkerError, match="not a GGUF file"):
        resolve(str(folder / "broken.gguf"), None, no_hub)
    (folder / "weights.bin").write_bytes(b"x")
    with pytest.raises(WorkerError, match="unknown kind"):
        resolve(str(folder / "weights.bin"), None, no_hub)
    (folder / "model.safetensors").unlink()
    with pytest.raises(WorkerError, match=r"no \*\.safetensors"):
        resolve(str(folder), None, no_hub)


def test_a_revision_of_local_files_is_refused(folder: Path) -> None:
    with pytest.raises(WorkerError, match="no meaning"):
        resolve(str(folder), "main", no_hub)


def test_the_digest_changes_with_the_files(folder: Path) -> None:
    before = resolve(str(folder), None, no_hub).digest()
    assert resolve(str(folder), None, no_hub).digest() == before
    weights = folder / "model.safetensors"
    stat = weights.stat()
    weights.write_bytes(b"1234567x")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = resolve(str(folder), None, no_hub).digest()
    assert changed != before, "content counts"
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    later = resolve(str(folder), None, no_hub).digest()
    assert later != changed, "time counts"
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert resolve(str(folder), None, no_hub).digest() != later, "what is kept beside the weights counts"


def cached_repository(home: Path, folder: Path) -> Path:
    """Lay ``folder`` out as the hub's cache does."""
    repository = home / "hub" / "models--some-org--some-model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_repository_comes_from_the_cache_at_its_commit(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cached_repository(tmp_path, folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for revision in (None, "main", COMMIT):
        found = resolve("some-org/some-model", revision, hub.cached)
        assert (found.kind, found.folder, found.revision) == (RefKind.HUB, snapshot, COMMIT)
    assert resolve("some-org/some-model/small.gguf", None, hub.cached).gguf == "small.gguf"
    with pytest.raises(WorkerError, match="not in the local cache") as refused:
        resolve("some-org/other-model", None, hub.cached)
    assert refused.value.fatal and "fetch" in refused.value.hint


def test_fetch_tells_where_the_files_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main([str(folder / "small.gguf")]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out) == {"path": str(folder / "small.gguf"), "revision": None} and out.err == ""
    assert fetch.main(["dummy:any"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": "", "revision": None}


def test_fetch_of_what_does_not_exist_is_exit_2_with_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["/nowhere/model"]) == 2
    out = capsys.readouterr()
    assert out.out == "" and "/nowhere/model does not exist" in out.err


def test_fetch_without_a_network_uses_the_cache_and_says_what_is_missing(folder: Path, tmp_path: Path) -> None:
    cached_repository(tmp_path, folder)
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "shadowsup.workers.transformers.fetch"]
    done = subprocess.run([*command, "some-org/some-model"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["revision"] == COMMIT
    missing = subprocess.run([*command, "some-org/absent"], env=environment, capture_output=True, text=True, check=False)
    assert missing.returncode == 1 and "some-org/absent" in missing.stderr and "Traceback" not in missing.stderr
