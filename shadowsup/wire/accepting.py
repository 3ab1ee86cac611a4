"""A listener whose process has no descriptor left for a connection: the selector reports it again at once, so it has to rest."""

from __future__ import annotations

import errno

NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS))
"""What accept(2) fails with then; with anything else the client is gone again."""
REST_S = 0.1
"""How long no connection is accepted then."""
