"""``${VAR}`` in scalars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowsup.supervisor.config.interpolate import expand

ENVIRON = {"HOST": "10.0.0.1", "EMPTY": "", "N": "7", "FLAG": "true", "YES": "yes"}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("${HOST}:80", "10.0.0.1:80"),
        ("a${EMPTY}b", "ab"),
        ("${EMPTY:-x}", "x"),
        ("${NOPE:-}", ""),
        ("${NOPE:-a:-b}", "a:-b"),
        ("${HOST:?needed}", "10.0.0.1"),
        ("$$HOST costs 5$", "$HOST costs 5$"),
        ("$${HOST}", "${HOST}"),
        ("100%", "100%"),
        ("a$/b", "a$/b"),
        ("${HOST}${HOST}", "10.0.0.110.0.0.1"),
    ],
)
def test_a_variable_is_replaced(text: str, result: str) -> None:
    assert expand(text, ENVIRON).text == result
    assert not expand(text, ENVIRON).faults


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("${NOPE}", "variable NOPE is not set"),
        ("${NOPE:?set it to the port}", "variable NOPE is not set: set it to the port"),
        ("${EMPTY:?}", "variable EMPTY is empty"),
        ("$HOST", "not replaced"),
        ("${HOST", "without a closing"),
        ("${HOST-x}", "not a form that is known"),
        ("${1}", "not a form that is known"),
        ("${}", "not a form that is known"),
        ("${A:-${B}}", "nested"),
    ],
)
def test_what_cannot_be_replaced_is_told(text: str, told: str) -> None:
    faults = expand(text, ENVIRON).faults
    assert [told in fault.message for fault in faults] == [True]


def test_every_variable_of_a_scalar_that_is_not_set_is_told() -> None:
    assert [fault.token for fault in expand("${A}-${B}", {}).faults] == ["${A}", "${B}"]


@given(st.text(alphabet="${}:-?AB x", max_size=20))
def test_no_text_makes_the_replacement_fail(text: str) -> None:
    result = expand(text, {"A": "1"})
    assert result.faults or isinstance(result.text, str)


def test_an_unquoted_variable_becomes_what_the_field_wants(load_text: Callable[..., Any]) -> None:
    loaded = load_text(
        """\
        version: ${ONE}
        gateway: {max_inflight: 9, listen: "${HOST}:8000", api_key_file: null}
        workers:
          - name: ${NAME}
            engine: ${ENGINE:-transformers}
            model: ${N}
            shadows: ${N}
            dtype: ${DTYPE}
            env:
              COUNT: ${N}
            args:
              flag: ${FLAG}
              count: ${N}
              text: "${N}"
              word: ${YES}
            served_name: ${EMPTY}
            kv:
              size: ${SIZE}
              block_tokens: ${BLOCK:-16}
              reserve: ${AUTO}
            gpus:
              - ${N}
        """,
        ENVIRON | {"ONE": "1", "NAME": "chat", "SIZE": "256MiB", "AUTO": "auto", "DTYPE": "float32"},
    )
    worker = loaded.config.workers[0]
    assert worker.shadows == 7
    assert worker.model == "7"
    assert worker.env == {"COUNT": "7"}
    assert worker.args == {"flag": True, "count": 7, "text": "7", "word": "yes"}
    assert worker.served_name is None
    assert (worker.kv.size, worker.kv.block_tokens, worker.kv.reserve) == (256 * 2**20, 16, None)
    assert worker.gpus == ("7",)
    assert worker.dtype.value == "float32"


def test_a_variable_that_is_no_number_is_refused_where_a_number_is_wanted(worker_problems: Callable[..., Any]) -> None:
    [problem] = worker_problems("shadows: ${WORD}", {"WORD": "many"})
    assert (problem.line, problem.column) == (6, 14)
    assert "whole number is wanted" in problem.message


def test_an_unset_variable_is_told_at_its_own_place(worker_problems: Callable[..., Any]) -> None:
    [problem] = worker_problems("env:\n  PATHS: /a:${NOPE}/b")
    assert (problem.line, problem.column) == (7, 17)
    assert "NOPE is not set" in problem.message


def test_keys_and_comments_are_left_alone(load_text: Callable[..., Any]) -> None:
    loaded = load_text(
        """\
        version: 1   # ${NOPE}
        workers:
          - {name: chat, engine: transformers, model: x, args: {"$NOPE": 1}}
        """
    )
    assert loaded.config.workers[0].args == {"$NOPE": 1}


def test_a_variable_cannot_bring_structure(load_text: Callable[..., Any]) -> None:
    loaded = load_text(
        """\
        version: 1
        workers:
          - name: chat
            engine: transformers
            model: ${EVIL}
        """,
        {"EVIL": "x\nshadows: 9"},
    )
    assert loaded.config.workers[0].model == "x\nshadows: 9"
    assert loaded.config.workers[0].shadows == 1
