"""The config loader under any text: problems with a place, or a config; never another error, never for long."""

from __future__ import annotations

import time
from pathlib import Path

import yaml
from fuzz_tools import anything, resident
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowsup.supervisor.config.loader import loads
from shadowsup.supervisor.errors import ConfigError

ROOT = Path(__file__).parents[2]
FILES = [(ROOT / "configs" / name).read_text() for name in ("node.yaml", "reference.yaml", "command.yaml", "gpu.yaml", "own-loop.yaml")]
SNIPPETS = st.sampled_from(
    [
        *"\t\0:'\"[{}|>\n\r%~#",
        *(": ", "- ", "? ", "---\n", "\ufeff", "é", "\u2028", "&a ", "*a", "<<: *a", "!!python/object:os.system "),
        *("${HOME}", "${X:-y}", "${", "$$", "0o17", "1e400", "9" * 400, "no", "null", "256GiB", "-5s"),
    ]
)


@st.composite
def edited(draw: st.DrawFn) -> str:
    """Return a real config after some edits: text put in, lines doubled, taken out, moved."""
    text = draw(st.sampled_from(FILES))
    for _ in range(draw(st.integers(1, 4))):
        at, what = draw(st.integers(0, len(text))), draw(st.integers(0, 4))
        lines = text.split("\n")
        number = draw(st.integers(0, len(lines) - 1))
        if what == 0:
            text = text[:at] + draw(SNIPPETS) + text[at:]
        elif what == 1:
            text = text[:at] + text[at + draw(st.integers(1, 30)) :]
        elif what == 2:
            text = "\n".join([*lines[: number + 1], *lines[number:]])
        elif what == 3:
            text = "\n".join([*lines[:number], " " * draw(st.integers(0, 9)) + lines[number].strip(), *lines[number + 1 :]])
        else:
            text = text[:at] + draw(st.text(max_size=8)) + text[at:]
    return text


def check(text: str) -> None:
    began_s = time.monotonic()
    try:
        loads(text, ROOT / "configs" / "fuzz.yaml", shown="fuzz.yaml")
    except ConfigError as error:
        assert error.problems
        assert all(problem.line >= 1 and problem.column >= 1 and problem.message for problem in error.problems)
    assert time.monotonic() - began_s < 30.0
    assert resident() < 2_000_000_000


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=edited())
def test_a_config_that_was_edited_badly_is_told_what_is_wrong(text: str) -> None:
    check(text)


@settings(deadline=None)
@given(text=st.one_of(st.text(max_size=200), st.lists(SNIPPETS, max_size=20).map("".join)))
def test_any_text_is_read_or_refused(text: str) -> None:
    check(text)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=anything, at=st.sampled_from(["node", "gateway", "memkeeper", "workers", "version"]))
def test_any_value_in_any_place_is_taken_or_refused(value: object, at: str) -> None:
    content = yaml.safe_load(FILES[0])
    content[at] = value
    check(yaml.safe_dump(content, allow_unicode=True))


@settings(deadline=None, max_examples=5)
@given(width=st.integers(2, 9), levels=st.integers(2, 9), depth=st.integers(1, 20_000))
def test_a_document_that_is_a_bomb_is_refused_before_it_goes_off(width: int, levels: int, depth: int) -> None:
    aliases = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]\n" for n in range(1, levels))
    check(aliases)
    check("workers: " + "[" * depth)
    check("\n".join(f"{' ' * n}a:" for n in range(min(depth, 900))))
