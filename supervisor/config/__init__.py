"""The node's config: the schema (`model`), strict YAML with positions (`document`, `loader`), and what is checked across fields.

`load` reads a file and returns a `LoadedConfig`, or raises `ConfigError` with everything that is wrong at once.
"""

from shadowsup.supervisor.config.loader import LoadedConfig, load
from shadowsup.supervisor.config.model import NodeConfig, WorkerConfig
from shadowsup.supervisor.errors import ConfigError

__all__ = ["ConfigError", "LoadedConfig", "NodeConfig", "WorkerConfig", "load"]
