"""vLLM as an engine: its own API server, scheduler and model runner, over kept memory. Nothing of vLLM is edited.

One small module a seam; each is reached by an option or a registry of vLLM's, or replaces one method, and says so in its first lines.
The first process of an engine is vLLM's API server (`server`); its EngineCore, which is forked from it, lives the life of an engine
(`life`).
"""

from __future__ import annotations

TESTED = ((0, 26), (0, 32))
"""The first and the last release (major, minor) that the seams were run with: 0.26.0 on an H200, 0.32.0 on a CPU."""
