"""The schema of the config, version 1. Attribute names are the YAML keys; durations are seconds, sizes are bytes, ``auto`` is None.

Field docstrings are the descriptions of the JSON Schema and of `configs/reference.yaml`, so they are written for the user.
What one field alone can tell is checked here; what needs two fields or the machine is checked in `checks`.
"""

from __future__ import annotations

import enum
import grp
import re
from pathlib import Path
from signal import Signals
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    Strict,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from shadowsup.supervisor.config import units
from shadowsup.supervisor.config.engine_kind import EngineKind as EngineKind
from shadowsup.supervisor.config.gpus import gpu_list
from shadowsup.supervisor.config.listen import ListenAddress, parse_listen
from shadowsup.supervisor.config.plain import plain
from shadowsup.supervisor.config.scalars import (
    NUMBER,
    Always,
    AutoCount,
    AutoDuration,
    AutoPort,
    AutoSize,
    Duration,
    Expanded,
    FilePath,
    ModelText,
    ProgramPath,
    Size,
    Text,
    from_file,
)

VERSION = 1

STATE_ROOT = "~/.local/state/shadowsup"
"""Logs and history of nodes that name no ``state_dir``, in a folder for each."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$"
ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
SIGNALS = ("TERM", "INT", "QUIT", "HUP", "USR1", "USR2", "KILL")

Name = Annotated[Text, Field(pattern=NAME_PATTERN)]


class Backend(str, enum.Enum):
    AUTO = "auto"
    CUDA = "cuda"
    HOST = "host"


class Dtype(str, enum.Enum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Verify(str, enum.Enum):
    NONE = "none"
    SAMPLE = "sample"
    FULL = "full"


class Section(BaseModel):
    """What every section of the config is: immutable, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=False)


class NodeSection(Section):
    """This node as a whole."""

    name: Name = "node"
    """Names the runtime directory; two nodes on one machine need two names."""
    state_dir: FilePath = Path(f"{STATE_ROOT}/node")
    """Logs and the history of recoveries live here, on disk. Left out: ~/.local/state/shadowsup/NAME, a folder for each node."""
    runtime_dir: FilePath | None = None
    """Sockets and process records. null: /run/shadowsup/NAME (root), $XDG_RUNTIME_DIR/shadowsup/NAME, or /tmp/shadowsup-UID/NAME."""
    group: Text | None = None
    """A Unix group whose members may use the reading verbs (status, memory, events, logs, …). The node's user must be one of them."""

    @property
    def gid(self) -> int | None:
        """The number of `group`. Raises KeyError: there is none of this name; the check of the whole config says so before."""
        return None if self.group is None else grp.getgrnam(self.group).gr_gid

    @model_validator(mode="before")
    @classmethod
    def _own_state(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "state_dir" in data:
            return data
        name = data.get("name", "node")
        return {**data, "state_dir": f"{STATE_ROOT}/{name}" if isinstance(name, str) else STATE_ROOT}


class MemkeeperSection(Section):
    """The process that keeps weights and KV blocks."""

    backend: Backend = Backend.AUTO
    """Where kept memory lives: cuda (GPU memory), host (main memory), or auto: cuda where a worker has GPUs, else host."""


class GatewaySection(Section):
    """The OpenAI-compatible HTTP server in front of all workers."""

    listen: Text = "127.0.0.1:8000"
    """HOST:PORT, [IPv6]:PORT or unix:/path. Port 0 takes a free one. Anything but loopback should have an api_key_file."""
    api_key_file: FilePath | None = None
    """One key a line, mode 0600. null: no authentication."""
    max_inflight: Annotated[int, Strict(), Field(ge=1, le=1_000_000), NUMBER] = 256
    """Requests admitted at once over all workers; then 429 with Retry-After."""

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        parse_listen(value)
        return str(value)

    @property
    def address(self) -> ListenAddress:
        """`listen`, taken apart."""
        return parse_listen(self.listen)


class KvSection(Section):
    """The KV cache of a worker. Its size is fixed for the worker's life, because kept blocks must fit the next engine."""

    size: AutoSize = None
    """Bytes, with a unit; auto: what is left on the device."""
    block_tokens: Annotated[int, Strict(), Field(ge=1, le=1024), NUMBER] = 16
    """Tokens a block, a power of two. Full blocks survive an engine; the tail of a request, less than a block, is computed again."""
    reserve: AutoCount = None
    """Blocks that only a successor may write before the dead engine's GPU work has ended. auto: 2 for each concurrent sequence."""

    @field_validator("block_tokens")
    @classmethod
    def _power(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"{value} is not a power of two")
        return value


class HangSection(Section):
    """When an engine that still lives but makes no progress counts as hung."""

    floor: Duration = 0.8
    """No verdict before this long without progress; from here on the bound follows the steps that were observed."""
    ceiling: Duration = 30.0
    """The verdict at the latest after this long without progress, however long steps usually are; while loading twice that, at least 1m."""


class HealthSection(Section):
    """How the supervisor judges that an engine is alive."""

    heartbeat: Duration = 0.2
    """Engines report this often."""
    hang: HangSection = HangSection()
    """Hang detection."""
    startup: Annotated[Duration, Field(gt=0)] = 600.0
    """An engine that is not ready after this long is stopped and started anew."""


class Rate(Section):
    """At most ``count`` in any ``window_s`` seconds."""

    count: int
    window_s: float

    def __str__(self) -> str:
        return f"{self.count} in {units.format_duration(self.window_s)}"


def _rate(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        count, window_s = units.parse_rate(value)
        return {"count": count, "window_s": window_s}
    if from_file(info):
        raise ValueError("it is not a limit; write it as COUNT in DURATION, like 10 in 10m")
    return value


RateText = Annotated[
    Rate,
    BeforeValidator(_rate),
    PlainSerializer(str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": units.RATE_PATTERN}),
]


class RestartSection(Section):
    """What follows when engines die again and again. Counts only engines that died without one committed step."""

    backoff: Annotated[tuple[Duration, ...], Field(min_length=1)] = (0.0, 1.0, 2.0, 5.0, 15.0, 60.0)
    """Pause before each next try; the last one repeats."""
    max: RateText = Rate(count=10, window_s=600.0)
    """More failures than this and the worker is down until someone restarts it. Written as COUNT in DURATION."""
    healthy_after: Duration = 60.0
    """An engine that served this long starts the count anew."""


class StopSection(Section):
    """How an engine is asked to stop."""

    signal: Annotated[Text, WithJsonSchema({"enum": [*SIGNALS, *(f"SIG{name}" for name in SIGNALS)]})] = "TERM"
    """The first signal: TERM, INT, QUIT, HUP, USR1, USR2 or KILL."""
    timeout: Duration = 30.0
    """Then SIGKILL to the whole process tree."""

    @field_validator("signal")
    @classmethod
    def _signal(cls, value: str) -> str:
        name = value.removeprefix("SIG")
        if name not in SIGNALS:
            raise ValueError(f"{value!r} is not a signal to stop with; use {', '.join(SIGNALS)}")
        return name

    @property
    def signum(self) -> Signals:
        """`signal` as a number."""
        return Signals[f"SIG{self.signal}"]


class LogsSection(Section):
    """The worker's output on disk."""

    max_size: Annotated[Size, Field(ge=4096)] = 64 * 2**20
    """A log file is rotated when it is this large."""
    keep: Annotated[int, Strict(), Field(ge=0, le=1000), NUMBER] = 5
    """Rotated files kept."""


class ReadySection(Section):
    """How a command engine shows that it is ready. Exactly one of them."""

    http: Text | None = None
    """A path, like /health: ready when GET on the engine's port answers 2xx."""
    exec: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """A command, run again and again: ready when it exits with status 0."""
    log: Text | None = None
    """A regular expression: ready when a line of output matches."""
    notify: Always | None = None
    """true: ready when the engine sends READY=1 to $NOTIFY_SOCKET, as under systemd."""

    @field_validator("http")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError(f"{value!r} is not a path; it starts with /")
        return value

    @field_validator("log")
    @classmethod
    def _log(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"{value!r} is not a regular expression: {error}") from None
        return value

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the probes that are set."""
        return tuple(name for name in ("http", "exec", "log", "notify") if getattr(self, name) is not None)


GpuIds = Annotated[
    tuple[Text, ...],
    BeforeValidator(gpu_list),
    WithJsonSchema({"type": "array", "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}}),
]


def _json_value(value: Any) -> Any:
    """Resolve `Expanded` scalars inside free-form values by the rules of plain scalars."""
    if isinstance(value, Expanded):
        return plain(str(value))
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return value


class WorkerConfig(Section):
    """One unit of service: one active engine and its shadows over the same memory."""

    name: Name
    """Names the worker everywhere; engine ids are NAME.K."""
    engine: EngineKind
    """transformers (own engine), vllm, loop (a serving loop of your own over kept memory), or command (any server, without kept memory)."""
    python: ProgramPath | None = None
    """Another Python interpreter for the engines, e.g. of an existing environment. null: this one."""
    model: ModelText | None = None
    """package:PACKAGE/FILE, a folder, a .gguf or safetensors file, or a hub id. A loop is told, and does with it as it likes."""
    revision: Text | None = None
    """Branch, tag or commit of a hub id."""
    served_name: Annotated[Text, Field(min_length=1)] | None = None
    """The model name that clients use. null: the worker's name."""
    dtype: Dtype = Dtype.AUTO
    """auto, float32, bfloat16 or float16. Only float32 repeats greedy output bit for bit in every batch."""
    args: Annotated[dict[str, Any], BeforeValidator(_json_value)] = {}
    """Passed to the engine as they are. Those that shadowsup owns are refused with a reason; a loop's are all its own."""
    gpus: GpuIds = ()
    """Indices in PCI bus order, GPU UUIDs or MIG UUIDs. []: CPU and main memory."""
    spares: GpuIds = ()
    """GPUs to move to when one of gpus is quarantined or in lasting trouble; weights are loaded there anew."""
    tensor_parallel: Annotated[int, Strict(), Field(ge=1, le=1024), NUMBER] = 1
    """Ranks of an engine; as many as there are gpus."""
    shadows: Annotated[int, Strict(), Field(ge=0, le=16), NUMBER] = 1
    """Parked engines, ready to take over. 0: an engine that dies is replaced by a new one over the kept memory."""
    kv: KvSection = KvSection()
    """The KV cache."""
    env: dict[Annotated[str, Field(pattern=ENV_NAME_PATTERN)], Text] = {}
    """Environment of the engines, beside PATH, HOME, LANG, HF_*, *_proxy, LD_LIBRARY_PATH, CUDA_*, NCCL_*, NVSHMEM_* and
    TORCH_SYMM_MEM_*; nothing else is inherited."""
    env_file: FilePath | None = None
    """NAME=VALUE lines, mode 0600; the values are never shown."""
    health: HealthSection = HealthSection()
    """Liveness."""
    restart: RestartSection = RestartSection()
    """Backoff and limit."""
    stop: StopSection = StopSection()
    """How to stop."""
    give_up_after: AutoDuration = None
    """A held request fails after this long without an engine. auto: the larger of 60 s and twice the measured cold start."""
    verify: Verify = Verify.NONE
    """Checksum of kept weights when an engine attaches: none, sample or full."""
    logs: LogsSection = LogsSection()
    """Output files."""
    command: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """command engines and loops: program and arguments, no shell. {port} stands for the port, in a loop {python} for the interpreter."""
    ready: ReadySection | None = None
    """command engines: how readiness shows."""
    metrics: Text | None = None
    """command engines: path of the server's Prometheus metrics, shown at the gateway's /metrics with a worker label. null: none."""
    port: AutoPort = None
    """command engines: the port the engine listens on, also in $PORT. auto: a free one for each engine."""
    cwd: FilePath | None = None
    """command engines and loops: working directory. null: that of the supervisor."""

    @field_validator("metrics")
    @classmethod
    def _metrics(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("/"):
            raise ValueError(f"{value!r} is not a path; it starts with /")
        return value

    @property
    def public_name(self) -> str:
        """The model name that clients use."""
        return self.served_name or self.name


class NodeConfig(Section):
    """The whole file."""

    version: Annotated[Literal[1], NUMBER]
    """Version of this format."""
    node: Annotated[NodeSection, Field(default_factory=NodeSection)]
    """This node as a whole."""
    memkeeper: MemkeeperSection = MemkeeperSection()
    """Kept memory."""
    gateway: GatewaySection = GatewaySection()
    """The HTTP server."""
    workers: Annotated[tuple[WorkerConfig, ...], Field(min_length=1)]
    """At least one worker."""

    def worker(self, name: str) -> WorkerConfig:
        """Return the worker with this name.

        Raises:
            KeyError: there is none.
        """
        for worker in self.workers:
            if worker.name == name:
                return worker
        raise KeyError(name)
