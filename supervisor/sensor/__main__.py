"""``python -m shadowsup.supervisor.sensor --endpoint ipc://… --gpu UUID …``. SIGTERM ends it with status 0."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys

from shadowsup.supervisor.sensor.process import Sensor, dialled


def main() -> int:
    """Run the sensor; return its exit code. 1: NVML cannot be used, the words are on stderr."""
    parser = argparse.ArgumentParser(prog="shadowsup-sensor")
    parser.add_argument("--endpoint", required=True, help="where the supervisor takes beats")
    parser.add_argument("--gpu", action="append", required=True, help="UUID of a GPU or MIG instance; several times for several")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two readings")
    parser.add_argument("--ready-fd", type=int, default=-1)
    parser.add_argument("--nvml", default="pynvml", help="module that speaks NVML")
    args = parser.parse_args()
    # The signal wakes whatever waits; between two calls into NVML it is looked at.
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write_fd)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    nvml = importlib.import_module(args.nvml)
    try:
        nvml.nvmlInit()
    except Exception as error:
        print(f"NVML cannot be used: {error}", file=sys.stderr)
        return 1
    with dialled(args.endpoint) as send:
        sensor = Sensor(nvml, args.gpu, send, interval_s=args.interval, stopped=read_fd)
        if args.ready_fd >= 0:
            os.write(args.ready_fd, b"1")
            os.close(args.ready_fd)
        sensor.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
