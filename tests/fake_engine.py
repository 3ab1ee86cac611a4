"""The toy engine (`shadowsup.workers.toy`) under the name by which tests ask for it: ``kind: fake_engine:create``."""

from __future__ import annotations

from shadowsup.workers.toy import ALPHABET, DIGEST, EOS, LEAD, TRAIL, ByteTokenizer, FakeEngine, create

__all__ = ["ALPHABET", "DIGEST", "EOS", "LEAD", "TRAIL", "ByteTokenizer", "FakeEngine", "create"]
