"""Every verb: where its command is, and its line in ``--help``. Adding one is adding a file and a line here."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """``target``: ``module:attribute`` of a click command, imported when the verb is used."""

    target: str
    help: str
    section: str


_HERE = "shadowsup.supervisor.cli"

VERBS: dict[str, Verb] = {
    "start": Verb(f"{_HERE}.start:start", "Run a node: the supervisor, its engines and the gateway.", "Run"),
    "stop": Verb(f"{_HERE}.stop:stop", "Stop the node, or one worker; leave nothing behind.", "Run"),
    "restart": Verb(f"{_HERE}.orders:restart", "Replace the engines of a worker.", "Run"),
    "reload": Verb(f"{_HERE}.reload:reload", "Apply a changed config: show what it does, touch only what changed.", "Run"),
    "drain": Verb(f"{_HERE}.orders:drain", "Let a worker finish its requests and take no new ones.", "Run"),
    "status": Verb(f"{_HERE}.status:status", "What goes on: workers, engines, memory, the gateway.", "Look"),
    "tui": Verb(f"{_HERE}.tui:tui", "The dashboard; --write: with orders and the config editor.", "Look"),
    "memory": Verb(f"{_HERE}.memory:memory", "Kept memory: segments and who uses them.", "Look"),
    "recoveries": Verb(f"{_HERE}.recoveries:recoveries", "Each failover with its timeline.", "Look"),
    "events": Verb(f"{_HERE}.events:events", "What happened; -f: as it happens.", "Look"),
    "logs": Verb(f"{_HERE}.logs:logs", "Output of the engines.", "Look"),
    "chat": Verb(f"{_HERE}.chat:chat", "Talk to a model in the terminal.", "Talk"),
    "failover": Verb(f"{_HERE}.orders:failover", "Switch a worker to its shadow, as planned.", "Drill"),
    "kill": Verb(f"{_HERE}.orders:kill", "Send an engine a signal, as a drill.", "Drill"),
    "bench": Verb(f"{_HERE}.bench:bench", "Measure the project's claims on this machine.", "Drill"),
    "init": Verb(f"{_HERE}.init:init", "Write a first config.", "Config"),
    "plan": Verb(f"{_HERE}.plan:plan", "What a config would run, and whether it fits in memory.", "Config"),
    "validate": Verb(f"{_HERE}.validate:validate", "Check a config; tell everything that is wrong at once.", "Config"),
    "config": Verb(f"{_HERE}.config:config", "Show the effective config, the schema or examples; edit a config.", "Config"),
    "doctor": Verb(f"{_HERE}.doctor:doctor", "Whether this machine is fit, and what to do about what is not.", "Config"),
    "completion": Verb(f"{_HERE}.completion:completion", "What a shell needs to complete shadowsup.", "Config"),
    "version": Verb(f"{_HERE}.version:version", "Show the version.", "Config"),
}
