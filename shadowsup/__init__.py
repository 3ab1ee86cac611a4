"""Keeps LLM engines' memory and clients' streams alive while engine processes die, hang or are replaced.

The root package holds only what every process of a node shares: the error root and the wire messages.
"""

from shadowsup.errors import ShadowsupError

__version__ = "0.1.0"
__all__ = ["ShadowsupError", "__version__"]
