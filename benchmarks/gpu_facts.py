"""Measures again what the design relies on about GPUs, on this machine: ``python benchmarks/gpu_facts.py OUT.json [--large]``.

Rows are numbered as in the design's list of GPU facts. Processes are started, looked at and killed; nothing of the card's settings is
touched. Needs an NVIDIA GPU, cuda-bindings, nvidia-ml-py and torch (for the checksum). ``--large`` holds up to 100 GB of device memory.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpu_child import Engine, timed
from gpu_rig import GIB, MIB, Device, ends, eventually, export, machine, memory, start_engine, start_exporter

from shadowsup.memkeeper.backends.cuda_driver import DriverError, call
from shadowsup.workers import checksum, checksum_cuda
from shadowsup.workers.arena_cuda import CudaArena
from shadowsup.workers.cuda_memory import DeviceBytes, kv_slabs


class Facts:
    """The measurements, each a method that adds rows."""

    def __init__(self, *, large: bool) -> None:
        self.rows: list[dict[str, Any]] = []
        self.large = large
        self.keeper, first = start_exporter()
        self.device = str(first["device"])
        self.nvml = Device(self.device)
        self.add("1", "cuInit in a fresh process", "ms", [first["init_s"] * 1e3])
        self.engine = Engine(self.device)
        self.add("13", "CUDA context", "ms", [self.engine.context_s * 1e3])

    def add(self, fact: str, what: str, unit: str, values: list[Any]) -> None:
        rounded = [round(value, 4) if isinstance(value, float) else value for value in values]
        row: dict[str, Any] = {"fact": fact, "what": what, "unit": unit, "values": rounded}
        if unit != "verdict":
            row |= {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4)}
        self.rows.append(row)
        shown = f"{row['median']:g} {unit} ({row['min']:g} to {row['max']:g}, n={len(values)})" if unit != "verdict" else str(values[0])
        print(f"{fact:>3}  {what}: {shown}", flush=True)

    # --- creating, exporting, importing ------------------------------------------------------------------------------------------

    def create_and_export(self) -> None:
        create, exporting = [], []
        for _ in range(5):
            (fd,), answer = export(self.keeper, 20 * GIB)
            create += answer["create_s"]
            exporting += answer["export_s"]
            os.close(fd)
        self.add("1", "create 20 GiB", "ms", [s * 1e3 for s in create])
        self.add("1", "export it", "ms", [s * 1e3 for s in exporting])
        self.add("1", "what an exported descriptor is", "verdict", [answer["link"]])
        self.add("1", "NVML lists the keeper", "verdict", [self.keeper.process.pid in self.nvml.pids()])

    def outlives_its_creator(self) -> None:
        before = self.nvml.used()
        dying, _ = start_exporter()
        (fd,), _ = export(dying, 8 * GIB)
        writer, _ = start_engine(self.device)
        writer.ask("map", [fd], sizes=[8 * GIB], access="read-write")
        writer.ask("fill", span=0, offset=0, size=8 * GIB, value=0xA5)
        wanted = writer.ask("digest", span=0, offset=7 * GIB, size=64 * MIB)
        dying.close()
        writer.close()
        self.engine.map([fd], [8 * GIB], "read-only")
        span = len(self.engine.spans) - 1
        found = self.engine.digest(span, 7 * GIB, 64 * MIB)
        self.add("2", "bytes are there after creator and writer were killed", "verdict", [found == wanted])
        self.engine.spans.pop().close()
        seconds, _ = timed(lambda: os.close(fd))
        self.add("2", "closing the last descriptor of 8 GiB", "ms", [seconds * 1e3])
        self.add("2", "memory is back after it", "verdict", [eventually(lambda: self.nvml.used() <= before + 8 * MIB)])

    def no_second_export(self) -> None:
        with memory(self.keeper, [64 * MIB]) as fds:
            self.add("3", "exporting an imported handle", "verdict", [self.engine.reexport(os.dup(fds[0]))["refused"]])

    def map_one_large(self) -> None:
        size = 64 * GIB if self.large else 16 * GIB
        samples: dict[str, list[float]] = {"import_s": [], "reserve_s": [], "map_and_access_s": [], "unmap": []}
        for _ in range(5):
            with memory(self.keeper, [size]) as fds:
                for name, seconds in self.engine.map(fds, [size], "read-write").items():
                    samples[name].append(seconds * 1e3)
                samples["unmap"].append(timed(self.engine.spans.pop().close)[0] * 1e3)
        total = [sum(parts) for parts in zip(samples["import_s"], samples["reserve_s"], samples["map_and_access_s"], strict=True)]
        self.add("4", f"import + reserve + map + access, one handle of {size // GIB} GiB", "ms", total)
        self.add("4", "unmap and free the addresses of it", "ms", samples["unmap"])

    def many_small(self) -> None:
        count, size = 1024, 2 * MIB
        fds, answer = export(self.keeper, size, count)
        self.add("5", "create 2 MiB", "us", [statistics.median(answer["create_s"]) * 1e6])
        self.add("5", "export 2 MiB", "us", [statistics.median(answer["export_s"]) * 1e6])
        times = self.engine.map(fds, [size] * count, "read-write")
        self.add("5", f"import {count} handles of 2 MiB", "ms", [times["import_s"] * 1e3])
        self.add("5", f"map them and set access", "ms", [times["map_and_access_s"] * 1e3])  # noqa: F541
        self.add("5", "unmap them", "ms", [timed(self.engine.spans.pop().close)[0] * 1e3])
        for fd in fds:
            os.close(fd)

    # --- death -------------------------------------------------------------------------------------------------------------------

    def signs_of_death(self, held: int, kills: int) -> None:
        """Facts 7 to 9: when each sign of a SIGKILLed CUDA process comes, by how much memory it has mapped."""
        names = ("late, high number", "late, low number", "early, high number", "early, low number", "pidfd")
        signs: dict[str, list[float]] = {name: [] for name in names}
        numbers: dict[str, Any] = {}
        with memory(self.keeper, [held]) as fds:
            for _ in range(kills):
                child, _ = start_engine(self.device)
                child.ask("map", fds, sizes=[held], access="read-write")
                child.ask("fill", span=0, offset=0, size=64 * MIB, value=1)
                (low, high), numbers = child.lifeline_at(3, 900)
                pidfd = os.pidfd_open(child.process.pid)
                lines = (high.fileno(), low.fileno(), child.early[1].fileno(), child.early[0].fileno(), pidfd)
                killed = time.perf_counter()
                child.process.send_signal(signal.SIGKILL)
                for sign, seconds in ends(dict(zip(lines, names, strict=True)), killed):
                    signs[sign].append(seconds * 1e3)
                os.close(pidfd)
                low.close()
                high.close()
                child.close()
        for sign, values in signs.items():
            name = sign if sign == "pidfd" else f"end of file of a lifeline made {sign}"
            self.add("9" if sign == "pidfd" else "7, 8", f"SIGKILL to {name}, {held // GIB} GiB held", "ms", values)
        self.rows[-1]["note"] = f"descriptors: late {numbers['numbers']}, early 3.. and 950.., the driver's {numbers['cuda']}"

    def zombie_writes(self, kills: int) -> None:
        """Fact 10: how long the kernel of a SIGKILLed process goes on writing memory that it shares with us."""
        last, gone, end_of_file = [], [], []
        size = 64 * MIB
        with memory(self.keeper, [size]) as fds:
            self.engine.map(fds, [size], "read-only")
            address = self.engine.spans[-1].address
            for _ in range(kills):
                child, _ = start_engine(self.device)
                child.ask("prepare")
                child.ask("map", fds, sizes=[size], access="read-write")
                (line,), _ = child.lifeline_at(900)
                child.ask("scribble", span=0, offset=0, size=4096, for_s=5.0)
                assert eventually(lambda: self._word(address) not in (0, self._word(address)))
                pidfd = os.pidfd_open(child.process.pid)
                killed = time.perf_counter()
                child.process.send_signal(signal.SIGKILL)
                changed, seen, dead, closed = killed, self._word(address), 0.0, 0.0
                while not dead or time.perf_counter() < dead + 0.05:
                    if (word := self._word(address)) != seen:
                        changed, seen = time.perf_counter(), word
                    if not closed and select.select([line], [], [], 0)[0]:
                        closed = time.perf_counter()
                    if not dead and select.select([pidfd], [], [], 0)[0]:
                        dead = time.perf_counter()
                last.append((changed - killed) * 1e3)
                end_of_file.append((closed - killed) * 1e3)
                gone.append((dead - killed) * 1e3)
                os.close(pidfd)
                line.close()
                child.close()
            self.engine.spans.pop().close()
        self.add("10", "SIGKILL to the last write of the dead process's kernel", "ms", last)
        self.add("10", "… to the end of file of its lifeline", "ms", end_of_file)
        self.add("10", "… to its pidfd", "ms", gone)
        verdict = all(a < b < c for a, b, c in zip(end_of_file, last, gone, strict=True))
        self.add("10", "every last write lies between the two", "verdict", [verdict])

    def _word(self, address: int) -> int:
        return int.from_bytes(self.engine.mapper.copy_out(address, 8), "little")

    # --- protection, cost, scratch, checksum -----------------------------------------------------------------------------------------

    def read_only(self) -> None:
        size = 64 * MIB
        with memory(self.keeper, [size]) as fds:
            child, _ = start_engine(self.device)
            child.ask("prepare")
            child.ask("map", fds, sizes=[size], access="read-write")
            child.ask("fill", span=0, offset=0, size=size, value=0x5A)
            access_s = child.ask("access", span=0, access="read-only")["access_s"]
            self.add("11", "turn 64 MiB read-only in place", "ms", [access_s * 1e3])
            refused = child.ask("fill", span=0, offset=0, size=size, value=0)["refused"]
            self.add("11", "driver memset of it afterwards", "verdict", [refused])
            self.add("11", "reading it", "verdict", [child.ask("digest", span=0, offset=0, size=MIB)["distinct"] == [0x5A]])
            child.ask("scribble", span=0, offset=0, size=4096, for_s=0.01)
            self.add("11", "a kernel that writes it ends its own context with", "verdict", [child.ask("synchronize")["state"]])
            self.engine.map(fds, [size], "read-only")
            unharmed = self.engine.digest(len(self.engine.spans) - 1, 0, size)["distinct"] == [0x5A]
            self.add("12", "memory and another process's context after that", "verdict", ["unharmed" if unharmed else "damaged"])
            self.engine.spans.pop().close()
            child.close()

    def context_cost(self) -> None:
        before = self.nvml.used()
        child, _ = start_engine(self.device)
        self.add("15", "device memory of a parked process with nothing but a context", "MiB", [(self.nvml.used() - before) / MIB])
        child.close()
        eventually(lambda: self.nvml.used() <= before + 8 * MIB)

    def arena(self, size: int) -> None:
        """Fact 19 and what a promotion maps, by size of the KV."""
        scratch, promote, rested = [], [], []
        slabs = kv_slabs(size)
        with memory(self.keeper, list(slabs)) as fds:
            for _ in range(5):
                arena = CudaArena(size, self.device, self.engine.mapper)
                scratch.append(timed(arena.map_scratch)[0] * 1e3)
                promote.append(timed(partial(arena.map_segments, fds, slabs))[0] * 1e3)
                arena.map_scratch()
                arena.rest()
                rested.append(timed(partial(arena.map_segments, fds, slabs))[0] * 1e3)
                maps = arena.scratch_maps
                arena.close()
        gib = f"{size / GIB:g} GiB"
        self.add("19", f"map scratch {maps} times over {gib}", "ms", scratch)
        self.add("19", f"promotion of {gib}: import {len(slabs)} slabs, unmap scratch, map", "ms", promote)
        self.add("19", f"promotion of {gib} of an arena at rest: import, map", "ms", rested)

    def partial_mapping(self) -> None:
        with memory(self.keeper, [64 * MIB]) as fds:
            handle = self.engine.mapper.import_fd(fds[0])
            address = self.engine.mapper.reserve(64 * MIB, 2 * MIB)
            try:
                call("cuMemMap", address, 32 * MIB, 0, handle, 0)
                call("cuMemUnmap", address, 32 * MIB)
                verdict = "possible"
            except DriverError as error:
                verdict = error.code
            self.engine.mapper.release(handle)
            self.engine.mapper.free(address, 64 * MIB)
        self.add("20", "mapping a part of a handle", "verdict", [verdict])

    def device_checksum(self) -> None:
        import torch

        size = 16 * GIB

        def rate(what: Callable[[], Any], amount: int, times: int) -> list[float]:
            what()
            samples = []
            for _ in range(times):
                torch.cuda.synchronize()
                samples.append(amount / timed(lambda: (what(), torch.cuda.synchronize()))[0] / 1e12)
            return samples

        with memory(self.keeper, [size]) as fds:
            self.engine.map(fds, [size], "read-write")
            words = torch.as_tensor(DeviceBytes(self.engine.spans[-1].address, size), device="cuda:0").view(torch.int64)
            words.random_(-(2**62), 2**62)
            head = words[: 3 * checksum.PIECE // 8]
            part = words[: 2 * GIB // 8]
            equal = (checksum_cuda.whole_pieces(head) == checksum.checksums(head.cpu().numpy().view("uint8"))).all()
            self.add("21", "device checksum equals the host's", "verdict", [bool(equal)])
            self.add("21", "checksum of 16 GiB on the device", "TB/s", rate(partial(checksum_cuda.whole_pieces, words), size, 7))
            self.add("21", "it is made by", "verdict", ["triton" if checksum_cuda.kernel_available() else "torch"])
            self.add("21", "torch.sum of the same bytes", "TB/s", rate(words.sum, size, 7))
            slow = partial(checksum_cuda.by_torch, part, 2 * GIB // checksum.PIECE)
            self.add("21", "checksum by torch operations", "TB/s", rate(slow, 2 * GIB, 3))
            del words, head, part, slow
            self.engine.spans.pop().close()

    def close(self) -> None:
        self.keeper.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--large", action="store_true", help="also hold 100 GB of device memory")
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    facts = Facts(large=options.large)
    steps: list[Callable[[], None]] = [facts.create_and_export, facts.outlives_its_creator, facts.no_second_export, facts.map_one_large]
    steps += [facts.many_small, facts.partial_mapping, facts.read_only, facts.context_cost]
    sizes = [2 * GIB, 16 * GIB, 40 * GIB, *([64 * GIB, 100 * GIB] if options.large else [])]
    steps += [partial(facts.arena, size) for size in sizes]
    steps += [lambda: facts.zombie_writes(options.kills), lambda: facts.signs_of_death(GIB, options.kills)]
    steps += [lambda: facts.signs_of_death(100 * GIB, options.kills)] if options.large else []
    steps += [facts.device_checksum]
    failures = []
    for step in steps:
        try:
            step()
        except Exception as error:  # one fact that cannot be measured must not cost the others
            failures.append(f"{type(error).__name__}: {error}")
            print(f"FAILED {failures[-1]}", flush=True)
    facts.close()
    document = {"schema": 1, "machine": machine(facts.device), "kills": options.kills, "rows": facts.rows, "failures": failures}
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
