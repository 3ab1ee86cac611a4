"""``${VAR}``, ``${VAR:-default}``, ``${VAR:?message}`` and ``$$`` in one scalar. Pure: the environment is given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_TOKEN = re.compile(r"\$(?:\$|\{(?P<body>[^}]*)(?P<end>\}?)|(?P<bare>[A-Za-z_][A-Za-z0-9_]*))")
_BODY = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::(?P<how>[-?])(?P<rest>.*))?\Z", re.DOTALL)


@dataclass(frozen=True)
class Fault:
    """What is wrong, and the text that it is about (for its position in the file)."""

    token: str
    message: str
    hint: str = ""


@dataclass(frozen=True)
class Result:
    """``text`` has every replacement that worked. ``variables``: names whose value was taken from the environment."""

    text: str
    variables: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    touched: bool = False
    """Whether there was anything to replace (``$$`` included)."""


def expand(text: str, environ: Mapping[str, str]) -> Result:
    """Replace the variables in ``text``. A ``$`` before anything else than a name, ``{`` or ``$`` stays as it is."""
    if "$" not in text:
        return Result(text)
    variables: list[str] = []
    faults: list[Fault] = []
    touched = False

    def replace(match: re.Match[str]) -> str:
        nonlocal touched
        touched = True
        token = match.group()
        if token == "$$":
            return "$"
        if bare := match.group("bare"):
            faults.append(Fault(token, f"{token} is not replaced here", f"write ${{{bare}}}, or $${bare} for a literal dollar sign"))
            return token
        if not match.group("end"):
            faults.append(Fault(token, "${ without a closing }", "write $${ for a literal dollar sign"))
            return token
        body = _BODY.match(match.group("body"))
        if body is None:
            faults.append(
                Fault(
                    token, f"{token}: not a form that is known", "use ${VAR}, ${VAR:-default}, ${VAR:?message}; $$ is a literal dollar sign"
                )
            )
            return token
        name, how, rest = body.group("name", "how", "rest")
        if rest and "${" in rest:
            faults.append(Fault(token, f"{token}}}: variables cannot be nested", "put the default value here as it is"))
            return token
        value = environ.get(name)
        if value or (value is not None and how is None):
            variables.append(name)
            return value
        if how == "-":
            return str(rest)
        if how == "?":
            state = "is empty" if value is not None else "is not set"
            faults.append(Fault(token, f"variable {name} {state}: {rest}" if rest else f"variable {name} {state}"))
        else:
            faults.append(Fault(token, f"variable {name} is not set", f"export {name}, or write ${{{name}:-default}}"))
        return token

    result = _TOKEN.sub(replace, text)
    return Result(result, tuple(variables), tuple(faults), touched)
