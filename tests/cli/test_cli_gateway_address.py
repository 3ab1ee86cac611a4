"""How ``chat`` finds the gateway and the key to show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shadowsup.supervisor.cli.gateway_address import Address, address_of, key_of
from shadowsup.supervisor.errors import SupervisorError


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:8000", Address("http://127.0.0.1:8000")),
        ("0.0.0.0:80", Address("http://127.0.0.1:80")),
        ("[::]:80", Address("http://[::1]:80")),
        ("127.0.0.1:8000,[::1]:8000", Address("http://127.0.0.1:8000")),
        ("unix:/run/x/http.sock", Address("http://localhost", "/run/x/http.sock")),
    ],
)
def test_every_way_of_listening_is_reached(listen: str, address: Address) -> None:
    assert address_of({"gateway": {"listen": listen}}) == address


@pytest.mark.parametrize("listen", ["", "127.0.0.1:0", "nonsense"])
def test_a_gateway_that_does_not_listen_yet_is_told(listen: str) -> None:
    with pytest.raises(SupervisorError, match="does not listen yet"):
        address_of({"gateway": {"listen": listen}})


def test_the_key_is_the_users_or_the_first_of_the_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\nfirst\nsecond\n")
    keys.chmod(0o600)
    config = {"version": 1, "gateway": {"api_key_file": "keys"}, "workers": [{"name": "chat", "engine": "transformers", "model": "x"}]}
    path = tmp_path / "node.json"
    path.write_text(json.dumps(config))
    monkeypatch.delenv("SHADOWSUP_API_KEY", raising=False)
    assert key_of({"config": str(path)}) == "first"
    assert key_of({}) is None
    keys.chmod(0o644)  # then the config is not right any more
    assert key_of({"config": str(path)}) is None
    monkeypatch.setenv("SHADOWSUP_API_KEY", "mine")
    assert key_of({"config": str(path)}) == "mine"
