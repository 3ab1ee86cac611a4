"""Strict loading: what is wrong is said with its place, all of it at once, and never guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowsup.supervisor.config import ConfigError, load
from shadowsup.supervisor.config.loader import loads
from shadowsup.supervisor.errors import Problem

Problems = Callable[..., list[Problem]]
Load = Callable[..., Any]


def places(problems: list[Problem]) -> list[tuple[int, int]]:
    return [(problem.line, problem.column) for problem in problems]


EVERYTHING = """\
version: 1
node:
\tname: demo
gatway: {}
workers:
  - name: chat
    engine: transformers
    model: ${MODEL}
    shadow: 1
    dtype: float32
    dtype: float16
    kv: {size: 256}
  - name: chat
    engine: transformers
    model: z
    health: {heartbeat: 2s}
"""


def test_everything_that_is_wrong_is_told_at_once_in_the_order_of_the_file(problems: Problems) -> None:
    found = problems(EVERYTHING)
    told = [(problem.line, problem.column, problem.message) for problem in found]
    assert [(line, column) for line, column, _ in told] == [(3, 1), (4, 1), (8, 12), (9, 5), (11, 5), (12, 16), (13, 11), (16, 25)]
    for (_, _, message), words in zip(
        told,
        ("a tab", "did you mean 'gateway'?", "MODEL is not set", "did you mean 'shadows'?", "duplicate key", "no unit", "taken", "below"),
        strict=True,
    ):
        assert words in message


def test_the_message_has_file_line_column_and_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("version: 1\nworkers:\n  - {name: chat, engine: transformers, model: x, env: {N: 1}}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert (
        f'{path}:3:59: workers[0].env.N: 1 without quotes is a number, but text is wanted\n    write "1"\n1 error' == caught.value.message
    )
    assert caught.value.exit_code == 2


# --- keys -------------------------------------------------------------------------------------------------------------------


def test_a_duplicate_key_is_told_with_the_first_place(worker_problems: Problems) -> None:
    """P25."""
    [problem] = worker_problems("shadows: 1\nshadows: 2")
    assert (problem.line, problem.column) == (7, 5)
    assert "the first is at line 6, column 5" in problem.message


def test_a_duplicate_key_deep_inside_free_form_values_is_told(worker_problems: Problems) -> None:
    [problem] = worker_problems("args:\n  a:\n    b: 1\n    b: 2")
    assert problem.path == "workers[0].args.a.b"


def test_a_duplicate_section_has_its_own_problems_told(worker_problems: Problems) -> None:
    found = worker_problems("kv: {size: 1MiB}\nkv: {size: ${NOPE}}".replace("${NOPE}", '"${NOPE}"'))
    assert [problem.message.split(";")[0] for problem in found] == ["duplicate key 'kv'", "workers[0].kv.size: variable NOPE is not set"]


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("shadow: 1", "did you mean 'shadows'?"),
        ("tensor-parallel: 1", "did you mean 'tensor_parallel'?"),
        ("Shadows: 1", "did you mean 'shadows'?"),
        ("modle: y", "did you mean 'model'?"),
        ("restart: {healty_after: 1s}", "did you mean 'healthy_after'?"),
        ("heartbeat: 1s", "workers[].health.heartbeat"),
        ("zzz: 1", "known here: args, command"),
    ],
)
def test_an_unknown_key_is_told_with_what_was_probably_meant(worker_problems: Problems, key: str, told: str) -> None:
    [problem] = worker_problems(key)
    assert "unknown key" in problem.message
    assert told in f"{problem.message} {problem.hint}"


def test_a_key_of_another_section_at_the_top_is_sent_there(problems: Problems) -> None:
    found = problems("version: 1\nlisten: 127.0.0.1:1\nworkers:\n  - {name: a, engine: transformers, model: x}\n")
    assert found[0].hint == "it belongs to gateway.listen"


def test_a_missing_key_is_told_at_what_lacks_it(problems: Problems) -> None:
    found = problems("node: {name: x}\nworkers:\n  - engine: transformers\n    model: x\n  - name: b\n    engine: transformers\n")
    assert [(problem.line, problem.message) for problem in found] == [
        (1, "the config has no version"),
        (3, "workers[0] has no name"),
        (5, "workers[1]: a transformers engine needs model"),
    ]


# --- tabs and syntax --------------------------------------------------------------------------------------------------------


def test_every_tab_is_told_and_what_follows_is_still_checked(problems: Problems) -> None:
    """P25."""
    text = "version: 1\nnode:\n\tname: demo\n\tgroop: x\nworkers:\n  - name:\tchat\n    engine: transformers\n    model: x\n"
    assert places(problems(text)) == [(3, 1), (4, 1), (4, 2), (6, 10)]


def test_tabs_of_any_width_are_told_once_each(problems: Problems) -> None:
    text = "version: 1\nworkers:\n\t- name: a\n\t  engine: transformers\n\t  model: x\n\t  kv:\n\t\tsize: 1MiB\n"
    found = problems(text)
    assert {problem.line for problem in found} == {3, 4, 5, 6, 7}
    assert all("tab" in problem.message for problem in found)


def test_a_tab_in_quotes_or_after_a_value_is_fine(load_text: Load) -> None:
    loaded = load_text('version: 1\nworkers:\n  - {name: a, engine: transformers, model: "a\tb"}\n')
    assert loaded.config.workers[0].model == "a\tb"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("version: 1\nnode: {name: x\n", "bracket is not closed"),
        ("version: 1\nnode:\n  name: x: y\n", "in quotes"),
        ("version: 1\ngateway:\n  listen: [::1]:8000\nworkers: []\n", "quotes"),
        ("version: 1\ngateway:\n  listen: @x\n", "put the value in quotes"),
        ("version: 1\nnode: {name: ${X}}\n", 'write variables in quotes: "${VAR}"'),
        ("version: 1\nnode:\n  name: *x\n", "undefined alias"),
        ("version: 1\n---\nversion: 1\n", "one document"),
        ("version 1\nnode: {}\n", "KEY: VALUE"),
        ("a: '\n", "not closed"),
        ("a: \x07\n", "U+0007"),
    ],
)
def test_a_syntax_error_is_told_with_what_to_do(problems: Problems, text: str, told: str) -> None:
    [problem] = problems(text)
    assert told in f"{problem.message} {problem.hint}"
    assert problem.line >= 1


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_told(problems: Problems, text: str) -> None:
    [problem] = problems(text)
    assert "empty" in problem.message or "mapping" in problem.message


@pytest.mark.parametrize("text", ["just text\n", "- a\n", "1\n"])
def test_a_file_that_is_no_mapping_is_told(problems: Problems, text: str) -> None:
    [problem] = problems(text)
    assert "a config is a mapping" in problem.message


def test_bytes_that_are_not_utf8_are_told_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_bytes(b"version: 1\nnode: {name: \xff}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert places(list(caught.value.problems)) == [(2, 14)]


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        load(tmp_path)


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_bytes("\ufeffversion: 1\r\nworkers:\r\n  - {name: a, engine: transformers, model: x}\r\n".encode())
    assert load(path).config.workers[0].model == "x"


# --- scalars ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["no", "Yes", "on", "OFF", "010", "0o17", "0x1F", "1:30", "1_000", "1e3", "1.5E3", "2026-01-31", ".inf"])
def test_a_scalar_that_yaml_readers_disagree_about_must_be_quoted(worker_problems: Problems, load_text: Load, value: str) -> None:
    [problem] = worker_problems(f"served_name: {value}")
    assert f"served_name: {value} without quotes is" in problem.message
    assert f'write "{value}"' in problem.hint
    loaded = load_text(f'version: 1\nworkers:\n  - {{name: a, engine: transformers, model: x, served_name: "{value}"}}\n')
    assert loaded.config.workers[0].served_name == value


@pytest.mark.parametrize("value", ["12", "1.5", "true", "-3"])
def test_a_number_or_boolean_where_text_is_wanted_must_be_quoted(worker_problems: Problems, value: str) -> None:
    [problem] = worker_problems(f"served_name: {value}")
    assert "text is wanted" in problem.message


@pytest.mark.parametrize("value", ["v1.2.3", "1.2.3", "a_1", "7b", "float16", "1-2", "012a", "e3", "::1", "a:1:2"])
def test_text_that_only_looks_a_little_like_a_number_needs_no_quotes(load_text: Load, value: str) -> None:
    loaded = load_text(f"version: 1\nworkers:\n  - name: a\n    engine: transformers\n    model: {value}\n")
    assert loaded.config.workers[0].model == value


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("shadows: -1", "at least 0"),
        ("shadows: one", "whole number"),
        ("shadows: 1.5", "whole number"),
        ("shadows: true", "whole number"),
        ("shadows: '1'", "whole number"),
        ("shadows:", "it is empty"),
        ("kv: 256MiB", "a mapping is wanted"),
        ("kv: {size: 10s}", "not a unit of size"),
        ("kv: {size: null}", "write auto"),
        ("kv: {block_tokens: 12}", "power of two"),
        ("kv: {reserve: -1}", "at least 0"),
        ("health: {startup: 10}", "write 10s"),
        ("health: {startup: 0s}", "above 0"),
        ("restart: {max: 10}", "10 in 10m"),
        ("restart: {max: 10 in 10}", "no unit"),
        ("restart: {backoff: []}", "must not be empty"),
        ("restart: {backoff: 5s}", "a list is wanted"),
        ("restart: {backoff: [1s, 2]}", "write 2s"),
        ("stop: {signal: TERMM}", "is not a signal"),
        ("engine2: x", "did you mean 'engine'?"),
        ("dtype: float23", "did you mean 'float32'?"),
        ("verify: all", "use none, sample, full"),
        ("env: [A]", "a mapping is wanted"),
        ("env: {A-B: x}", "does not fit"),
        ("served_name: ''", "must not be empty"),
        ("logs: {max_size: 1B}", "at least 4096"),
        ("give_up_after: 5", "write 5s"),
    ],
)
def test_a_wrong_value_is_told_in_words(worker_problems: Problems, line: str, told: str) -> None:
    [problem] = worker_problems(line)
    assert told in f"{problem.message} {problem.hint}"
    assert problem.line == 6


def test_a_worker_that_is_no_mapping_does_not_hide_the_others(problems: Problems) -> None:
    found = problems(
        "version: 1\nworkers:\n  - chat\n  - {name: b, engine: transformers, model: x, shadows: -1}\n  - {name: b, engine: command}\n"
    )
    assert [problem.line for problem in found] == [3, 4, 5, 5, 5]


def test_no_worker_is_told(problems: Problems) -> None:
    assert "must not be empty" in problems("version: 1\nworkers: []\n")[0].message
    assert "has no workers" in problems("version: 1\n")[0].message


def test_another_version_is_told(problems: Problems) -> None:
    [problem] = problems("version: 2\nworkers:\n  - {name: a, engine: transformers, model: x}\n")
    assert "2 is not known here" in problem.message
    assert problem.hint == "write 1"


@pytest.mark.parametrize("name", ["a b", "-a", "a.b", "ä", "x" * 33, '""', "a/b"])
def test_a_name_that_cannot_be_part_of_a_file_name_is_refused(problems: Problems, name: str) -> None:
    [problem] = problems(f"version: 1\nworkers:\n  - {{name: {name}, engine: transformers, model: x}}\n")
    assert "is not a name" in problem.message


# --- anchors ----------------------------------------------------------------------------------------------------------------


def test_anchors_aliases_and_merge_keys_work(load_text: Load) -> None:
    loaded = load_text(
        """\
        version: 1
        x-base: &base {engine: transformers, model: x, shadows: 2}
        workers:
          - {<<: *base, name: a}
          - {name: b, <<: [*base], shadows: 0}
        """
    )
    assert [(worker.name, worker.model, worker.shadows) for worker in loaded.config.workers] == [("a", "x", 2), ("b", "x", 0)]


def test_a_mistake_behind_an_anchor_is_told_where_it_is_written(problems: Problems) -> None:
    found = problems(
        """\
        version: 1
        x-base: &base
          engine: transformers
          model: x
          shadow: 2
        workers:
          - {<<: *base, name: a}
        """
    )
    assert places(found) == [(5, 3)]


def test_an_alias_bomb_is_refused(problems: Problems) -> None:
    lines = ["version: 1", "x-a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"x-a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    found = problems("\n".join([*lines, "workers:", "  - {name: a, engine: transformers, model: x}", ""]))
    assert "aliases expanded" in found[0].message


def test_an_alias_to_what_contains_it_is_refused(problems: Problems) -> None:
    found = problems("version: 1\nx-a: &a [*a]\nworkers:\n  - {name: a, engine: transformers, model: x}\n")
    assert "contains it" in found[0].message
    found = problems("version: 1\nx-a: &a\n  b: {<<: *a}\nworkers:\n  - {name: a, engine: transformers, model: x}\n")
    assert "contains it" in found[0].message


def test_deep_nesting_is_refused(problems: Problems) -> None:
    assert any("nested" in problem.message for problem in problems("x-a: " + "[" * 60 + "]" * 60 + "\n"))
    assert "nested" in problems("x-a: " + "[" * 5000 + "]" * 5000 + "\n")[0].message


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!mine", "!!int"])
def test_explicit_tags_are_refused(problems: Problems, tag: str) -> None:
    found = problems(f"version: 1\nworkers:\n  - {{name: a, engine: transformers, model: {tag} '1'}}\n")
    assert "is not allowed" in found[0].message


def test_a_merge_of_something_else_is_told(problems: Problems) -> None:
    assert "takes a mapping" in problems("version: 1\nworkers:\n  - {<<: x, name: a, engine: transformers, model: x}\n")[0].message


def test_a_key_that_is_no_text_is_told(problems: Problems) -> None:
    assert "plain text" in problems("version: 1\n? [a]\n: 1\nworkers:\n  - {name: a, engine: transformers, model: x}\n")[0].message


# --- nothing else happens ---------------------------------------------------------------------------------------------------

_WORDS = [
    "version: 1",
    "workers:",
    "- name: a",
    "engine: command",
    "  ",
    "\t",
    "&a",
    "*a",
    "<<: ",
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "${A}",
    "$",
    "%",
    "\n",
    ": ",
    "#",
    "|",
    "!!x",
    "?",
]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(_WORDS), max_size=30).map("".join))
def test_no_text_fails_in_another_way(text: str) -> None:
    try:
        loads(text, Path("/nowhere/node.yaml"), environ={})
    except ConfigError as error:
        assert error.problems
        assert all(problem.line > 0 and problem.column > 0 for problem in error.problems)


def test_a_value_under_a_secret_name_is_never_shown(worker_problems: Problems, problems: Problems) -> None:
    for found in (
        worker_problems("env: {API_KEY: 12345}"),
        worker_problems("args: {device: ${HF_TOKEN}}".replace("${HF_TOKEN}", '"${HF_TOKEN}"'), {"HF_TOKEN": "12345"}),
        worker_problems("shadows: ${MY_SECRET}", {"MY_SECRET": "12345"}),
        worker_problems("kv:\n  size: ${MY_SECRET}", {"MY_SECRET": "12345"}),
    ):
        assert found
        assert not any("12345" in str(problem) for problem in found)


def test_relative_paths_count_from_the_folder_of_the_file(tmp_path: Path, load_text: Load) -> None:
    (tmp_path / "sub").mkdir()
    loaded = load_text(
        """\
        version: 1
        node: {state_dir: state, runtime_dir: ~/run}
        workers:
          - {name: a, engine: command, command: [x], ready: {notify: true}, cwd: sub}
        """
    )
    assert loaded.config.node.state_dir == tmp_path / "state"
    assert loaded.config.node.runtime_dir == Path("~/run").expanduser()
    assert loaded.config.workers[0].cwd == tmp_path / "sub"


@pytest.mark.parametrize(
    ("model", "kept"),
    [
        ("org/name", "org/name"),
        ("package:p/f.gguf", "package:p/f.gguf"),
        ("/abs/m.gguf", "/abs/m.gguf"),
        ("./m.gguf", "{folder}/m.gguf"),
        ("here/m.gguf", "{folder}/here/m.gguf"),
        ("~/m.gguf", "{home}/m.gguf"),
    ],
)
def test_a_model_is_a_path_when_it_looks_like_one_or_is_there(tmp_path: Path, load_text: Load, model: str, kept: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "m.gguf").touch()
    loaded = load_text(f"version: 1\nworkers:\n  - {{name: a, engine: transformers, python: python3, model: '{model}'}}\n")
    assert loaded.config.workers[0].model == kept.format(folder=tmp_path, home=Path.home())
    assert loaded.config.workers[0].python == Path("python3")


def test_each_wrong_item_of_a_list_is_told(worker_problems: Callable[..., list[Problem]]) -> None:
    found = worker_problems("restart: {backoff: [0, 60]}")
    assert [problem.message.partition(":")[0] for problem in found] == ["workers[0].restart.backoff[0]", "workers[0].restart.backoff[1]"]
