"""Kept memory: segments, leases and the KV ledger. The keeper process creates memory and hands it out as fds; it never maps a model.

Engines and the supervisor use `shadowsup.memkeeper.client` and `shadowsup.memkeeper.ledger`; nothing here imports the other packages.
"""
