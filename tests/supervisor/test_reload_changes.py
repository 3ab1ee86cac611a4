"""What a changed config means, setting by setting, and the history of configs."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from shadowsup.supervisor import changes
from shadowsup.supervisor.config import NodeConfig, WorkerConfig
from shadowsup.supervisor.config.revision import revision_of
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.protocol import Change, Consequence, KvFate
from shadowsup.supervisor.revisions import KEEP, Revisions, put_back


def config(*workers: dict[str, Any], **sections: Any) -> NodeConfig:
    made = [{"engine": "transformers", "model": "toy", "kv": {"size": "1MiB"}, **worker} for worker in workers or ({"name": "chat"},)]
    return NodeConfig.model_validate({"version": 1, "workers": made, **sections})


def roomy(worker: WorkerConfig, kv: KvFate) -> changes.Room:
    return changes.Room(worker.engine.keeps_memory, 21.0, "no shadow")


def full(worker: WorkerConfig, kv: KvFate) -> changes.Room:
    return changes.Room(False, 21.0, "the GPU is full")


def of(old: NodeConfig, new: NodeConfig, look: changes.Look = roomy) -> dict[str, Consequence]:
    return {change.name or change.section: change for change in changes.compare(old, new, look)}


def test_the_same_config_changes_nothing_however_it_is_written() -> None:
    found = of(config({"name": "chat", "kv": {"size": "1GiB"}}), config({"name": "chat", "kv": {"size": "1024MiB"}, "shadows": 1}))
    assert found["chat"].change is Change.KEPT
    assert changes.summary(tuple(found.values())) == "nothing changes"


@pytest.mark.parametrize(
    ("change", "kv"),
    [
        ({"env": {"A": "1"}}, KvFate.KEPT),
        ({"health": {"heartbeat": "100ms"}}, KvFate.KEPT),
        ({"args": {"max_batch": 4}}, KvFate.ENGINE_DECIDES),
        ({"python": "/usr/bin/python3"}, KvFate.ENGINE_DECIDES),
        ({"model": "other"}, KvFate.NEW),
        ({"dtype": "float32"}, KvFate.NEW),
        ({"kv": {"size": "2MiB"}}, KvFate.NEW),
    ],
)
def test_what_an_engine_is_started_with_replaces_it_through_its_shadow(change: dict[str, Any], kv: KvFate) -> None:
    found = of(config({"name": "chat"}, {"name": "mistral"}), config({"name": "chat", **change}, {"name": "mistral"}))
    assert (found["chat"].change, found["chat"].kv) == (Change.REPLACED, kv)
    assert found["mistral"].change is Change.KEPT
    words = changes.summary(tuple(found.values()))
    assert words.startswith("replaces chat through its shadow") and words.endswith("mistral untouched")


@pytest.mark.parametrize(
    "change",
    [
        {"served_name": "gpt"},
        {"shadows": 2},
        {"restart": {"max": "3 in 1m"}},
        {"stop": {"timeout": "3s"}},
        {"health": {"hang": {"ceiling": "9s"}, "startup": "1m"}},
        {"give_up_after": "9s"},
        {"logs": {"keep": 1}},
        {"verify": "full"},
    ],
)
def test_what_needs_no_new_engine_is_changed_in_place(change: dict[str, Any]) -> None:
    old, new = config({"name": "chat"}), config({"name": "chat", **change})
    assert of(old, new)["chat"].change is Change.IN_PLACE
    assert revision_of(old.worker("chat")) == revision_of(new.worker("chat"))


def test_on_a_gpu_the_number_of_shadows_decides_how_much_kv_there_is_unless_its_size_is_said() -> None:
    gpu = {"name": "chat", "gpus": [0]}
    assert of(config({**gpu, "kv": {}}), config({**gpu, "kv": {}, "shadows": 2}))["chat"].kv is KvFate.NEW
    assert of(config(gpu), config({**gpu, "shadows": 2}))["chat"].change is Change.IN_PLACE


def test_without_room_the_plan_says_how_long_nobody_serves() -> None:
    found = of(config(), config({"name": "chat", "env": {"A": "1"}}), full)["chat"]
    assert (found.change, found.gap_s) == (Change.GAP, 21.0)
    assert "with a gap of about 21 s" in found.text and "the GPU is full" in found.text


def test_a_command_has_no_shadow() -> None:
    command = {"name": "web", "engine": "command", "model": None, "kv": None, "ready": {"http": "/"}}
    command = {key: value for key, value in command.items() if value is not None}
    make = lambda words: NodeConfig.model_validate({"version": 1, "workers": [{**command, "command": words}]})  # noqa: E731
    found = of(make(["a", "--key", "sesame"]), make(["b", "--key", "sesame"]))["web"]
    assert found.change is Change.GAP and found.kv is KvFate.NONE
    assert "sesame" not in repr(found)


def test_workers_come_and_go_and_another_name_is_another_worker() -> None:
    found = of(config({"name": "chat"}), config({"name": "talk"}))
    assert found["talk"].change is Change.ADDED and found["chat"].change is Change.REMOVED


@pytest.mark.parametrize(
    "sections",
    [{"node": {"name": "other"}}, {"node": {"state_dir": "/elsewhere"}}, {"memkeeper": {"backend": "cuda"}}],
)
def test_what_the_node_is_made_of_needs_a_restart_and_refuses_everything(sections: dict[str, Any]) -> None:
    found = changes.compare(config(), config({"name": "chat", "env": {"A": "1"}}, **sections), roomy)
    message, hint = changes.refusal(found)
    assert "restart of the node" in message and hint


def test_the_backend_that_is_in_use_anyway_is_no_change() -> None:
    assert changes.refusal(changes.compare(config(), config(memkeeper={"backend": "host"}), roomy)) == ("", "")


def test_a_gpu_that_the_memkeeper_does_not_know_and_another_kind_of_engine_are_refused() -> None:
    assert "GPU 1" in of(config({"name": "chat", "gpus": [0]}), config({"name": "chat", "gpus": [1]}))["chat"].text
    loop = {"name": "chat", "engine": "loop", "command": ["x"]}
    assert of(config(), config(loop))["chat"].change is Change.NODE_RESTART


def test_the_gateway_changes_in_place() -> None:
    found = of(config(), config(gateway={"listen": "127.0.0.1:9000", "max_inflight": 3}))["gateway"]
    assert found.change is Change.IN_PLACE and "127.0.0.1:9000" in found.text


def test_secrets_are_not_shown() -> None:
    old, new = config({"name": "chat", "env": {"HF_TOKEN": "abc"}}), config({"name": "chat", "env": {"HF_TOKEN": "def", "B": "ghi"}})
    found = changes.compare(old, new, roomy, hidden={("chat", "env.B")})
    assert not {"abc", "def", "ghi"} & {word for key in found[0].keys for word in (key.old, key.new)}


def test_another_content_of_the_env_file_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("A=1\n")
    worker = config({"name": "chat", "env_file": str(path)}).worker("chat")
    before = revision_of(worker)
    path.write_text("A=2\n")
    assert revision_of(worker) != before


# --- history ----------------------------------------------------------------------------------------------------------------------


def test_revisions_are_numbered_kept_private_and_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "revisions"
    book = Revisions(folder)
    assert book.begin("a", "/n.yaml").id == "r1"
    assert book.begin("a", "/n.yaml").id == "r1", "nothing was changed since the last start"
    book.add("b", "/n.yaml", "reload")
    again = Revisions(folder)
    assert again.current is not None and again.current.id == "r2" and again.previous is not None
    assert again.text(again.previous) == "a"
    assert stat.S_IMODE((folder / "r2.yaml").stat().st_mode) == 0o600
    with pytest.raises(SupervisorError, match="no revision 'r9'"):
        again.find("r9")


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    book = Revisions(tmp_path)
    for number in range(KEEP + 5):
        book.add(str(number), "/n.yaml", "reload")
    assert len(list(tmp_path.glob("r*.yaml"))) == KEEP and book.all[0].id == "r6"


def test_a_revision_that_was_tampered_with_is_not_brought_back(tmp_path: Path) -> None:
    book = Revisions(tmp_path)
    made = book.add("a", "/n.yaml", "start")
    (tmp_path / "r1.yaml").write_text("b")
    with pytest.raises(SupervisorError, match="was changed"):
        book.text(made)


def test_a_damaged_history_begins_anew_and_a_full_disk_costs_only_the_history(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("{")
    book = Revisions(tmp_path)
    assert book.all == []
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert Revisions(blocked).add("a", "/n.yaml", "start").id == "r1"


def test_undo_puts_the_file_back_unless_somebody_edited_it(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("new")
    path.chmod(0o640)
    assert "node.yaml~" in put_back(path, "old", instead_of="new")
    assert (path.read_text(), (tmp_path / "node.yaml~").read_text()) == ("old", "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.write_text("edited")
    assert "was edited since" in put_back(path, "old", instead_of="new")
    assert path.read_text() == "edited"
