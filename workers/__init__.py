"""The engine side: the SDK that attaches an engine process to kept memory and to its supervisor, and the engines built on it.

Needs only pyzmq, msgspec and numpy (plus what the engine itself needs), so that it can run in an existing engine environment.
"""
