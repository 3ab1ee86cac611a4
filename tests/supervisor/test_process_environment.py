"""What an engine inherits, what is never shown, and another interpreter's path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shadowsup.supervisor.environment import engine_environment, read_env_file, redact
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.pypath import check_python, make_pypath


def secret_file(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_only_named_variables_are_inherited_and_later_sources_win(tmp_path: Path) -> None:
    inherited = {
        "PATH": "/bin",
        "HOME": "/root",
        "LANG": "C",
        "LC_ALL": "C",
        "HF_HOME": "/hf",
        "https_proxy": "p",
        "NO_PROXY": "n",
        "LD_LIBRARY_PATH": "/lib",
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "TMPDIR": "/t",
        "PYTHONPATH": "/other",
        "AWS_SECRET_ACCESS_KEY": "x",
        "SSH_AUTH_SOCK": "s",
        "MY_PATH": "m",
        "my_proxy_x": "q",
    }
    file = secret_file(tmp_path / "env", "LANG=file\nA=file\nB=file\n")
    found = engine_environment(inherited, env={"A": "env", "C": "env"}, env_file=file, extra={"C": "ours", "PYTHONPATH": "/ours"})
    assert found == {
        "PATH": "/bin",
        "HOME": "/root",
        "LANG": "file",
        "LC_ALL": "C",
        "HF_HOME": "/hf",
        "https_proxy": "p",
        "NO_PROXY": "n",
        "LD_LIBRARY_PATH": "/lib",
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "TMPDIR": "/t",
        "A": "env",
        "B": "file",
        "C": "ours",
        "PYTHONPATH": "/ours",
    }


def test_env_file_forms(tmp_path: Path) -> None:
    text = "# comment\n\nA=1\nexport B = two words \nC='# not a comment'\nD=\"q=1\"\nE=\nF=$HOME\n"
    expected = {"A": "1", "B": "two words", "C": "# not a comment", "D": "q=1", "E": "", "F": "$HOME"}
    assert read_env_file(secret_file(tmp_path / "env", text)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=1\nhunter2", "env:2: this line is not NAME=value"),
        ("1A=hunter2", "env:1: this line"),
        ("A='hunter2", "quote of A is not closed"),
        ("A=1\nA=hunter2", "env:2: A is set twice"),
        ("A=hunter2\0", "null byte"),
    ],
)
def test_env_file_errors_name_the_line_and_no_value(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SupervisorError, match=words) as caught:
        read_env_file(secret_file(tmp_path / "env", text))
    assert "hunter2" not in str(caught.value)


def test_env_file_that_others_may_read_or_nobody_can_is_refused(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "env", "A=1\n")
    file.chmod(0o640)
    with pytest.raises(SupervisorError, match=r"others may read .* \(mode 0640\) \(chmod 600"):
        read_env_file(file)
    with pytest.raises(SupervisorError, match="No such file"):
        read_env_file(tmp_path / "missing")
    file.chmod(0o600)
    file.write_bytes(b"A=\xff")
    with pytest.raises(SupervisorError, match="not text"):
        read_env_file(file)


def test_secret_names_are_redacted() -> None:
    shown = redact({"HF_TOKEN": "a", "api_key": "b", "DB_PASSWORD": "c", "CLIENT_SECRET_2": "d", "HF_HOME": "/e"})
    assert shown == {"HF_TOKEN": "***", "api_key": "***", "DB_PASSWORD": "***", "CLIENT_SECRET_2": "***", "HF_HOME": "/e"}


def test_pypath_shows_the_engine_side_and_nothing_else(tmp_path: Path) -> None:
    pypath = make_pypath(tmp_path)
    assert make_pypath(tmp_path) == pypath == tmp_path / "pypath"
    (pypath / "shadowsup" / "wire").unlink()
    (pypath / "shadowsup" / "wire").symlink_to("/nowhere")
    make_pypath(tmp_path)
    code = """
import sys
sys.path[:] = [path for path in sys.path if 'editable' not in path]
sys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in repr(finder)]
import shadowsup.wire.engine, shadowsup.workers.api, shadowsup.memkeeper.protocol
print(shadowsup.__path__, shadowsup.workers.__file__)
try:
    import shadowsup.supervisor
    print('supervisor too')
except ImportError:
    print('no supervisor')
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(pypath), "PYTHONSAFEPATH": "1"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"['{pypath}/shadowsup'] {pypath}/shadowsup/workers/__init__.py\nno supervisor\n"
    assert {entry.name for entry in (pypath / "shadowsup").iterdir()} - {"__pycache__"} == {
        "__init__.py",
        "errors.py",
        "robust_mutex.py",
        "wire",
        "memkeeper",
        "workers",
    }


def test_pypath_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SupervisorError, match="cannot make"):
        make_pypath(tmp_path / "file")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_interpreter_is_described() -> None:
    info = check_python(sys.executable)
    assert info.version == sys.version_info[:3]
    assert info.executable == sys.executable


def test_unusable_interpreters_are_explained(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    old = """echo '{"executable": "/x", "version": [3, 9, 1], "missing": []}'"""
    cases = [
        (str(tmp_path / "none"), "there is no Python at"),
        (str(plain), "cannot be run: Permission denied"),
        (script(tmp_path / "broken", "echo no luck >&2; exit 1"), "is not a working Python: no luck"),
        (script(tmp_path / "silent", "exit 0"), r"is not a working Python \(exit status 0\)"),
        (script(tmp_path / "old", old), r"is Python 3\.9\.1 \(engines need Python 3\.11 or newer\)"),
    ]
    for path, words in cases:
        with pytest.raises(SupervisorError, match=words):
            check_python(path)
    with pytest.raises(SupervisorError, match="did not answer within"):
        check_python(script(tmp_path / "slow", "exec sleep 60"), timeout_s=0.1)
    with pytest.raises(SupervisorError, match="has no pyzmq_x, no_such_module") as caught:
        check_python(sys.executable, ("numpy", "pyzmq_x", "no_such_module"))
    assert caught.value.hint == f"{sys.executable} -m pip install pyzmq_x no_such_module"
