"""The gateway process: OpenAI-compatible HTTP in front of the engines, and the place where a client's stream outlives its engine.

`stream` and `worker` decide (pure, no I/O, no clock); `link`, `channel`, `gateway` and `server` are the thin shell around them.
"""
