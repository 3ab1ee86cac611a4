"""``python -m shadowsup.workers.transformers.fetch MODEL [--revision R]``: make a model's files be here before an engine starts.

Downloads a repository once, at a pinned commit; a local reference is only checked. Progress goes to stderr, a line at a time; the
result to stdout, one JSON object ``{"path": …, "revision": …}`` (``revision`` null for local files, ``path`` empty for ``dummy:``).

Exit codes: 0 done · 1 failed, trying again may help · 2 there is no such model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.transformers import hub, model_ref


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="fetch", description="Make a model's files be here.")
    parser.add_argument("model")
    parser.add_argument("--revision", default=None)
    arguments = parser.parse_args(argv)
    try:
        found = model_ref.resolve(arguments.model, arguments.revision, hub.download(_say))
    except WorkerError as error:
        _say(str(error))
        return 2 if error.fatal else 1
    print(json.dumps({"path": found.path, "revision": found.revision}))
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
