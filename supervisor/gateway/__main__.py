"""``python -m shadowsup.supervisor.gateway SPEC.json``: run a gateway. Exit status: 0 drained, 2 no usable spec."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from shadowsup.supervisor.gateway.process import serve
from shadowsup.wire.gateway import GatewaySpec


def main() -> int:
    """Run until drained; return the exit status."""
    if len(sys.argv) != 2:
        print("usage: python -m shadowsup.supervisor.gateway SPEC.json", file=sys.stderr)
        return 2
    try:
        spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=GatewaySpec)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"cannot read the gateway's spec {sys.argv[1]}: {error}", file=sys.stderr)
        return 2
    serve(spec)
    return 0


if __name__ == "__main__":
    sys.exit(main())
