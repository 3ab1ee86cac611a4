"""``python -m shadowsup.supervisor.bench.toy_node CONFIG RUNTIME_DIR``: a node whose transformers engines are the toy (`workers.toy`)."""

from __future__ import annotations

import sys
from pathlib import Path

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor import node_run
from shadowsup.supervisor.config import load

ADAPTERS = {"transformers": "shadowsup.workers.toy:create"}


def main(config: str, runtime_dir: str) -> int:
    """Run the node in the foreground; return its exit code."""
    try:
        return node_run.run(load(Path(config)), Path(runtime_dir), reporter=lambda text: print(text, flush=True), adapters=ADAPTERS)
    except ShadowsupError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return int(getattr(error, "exit_code", 1))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
