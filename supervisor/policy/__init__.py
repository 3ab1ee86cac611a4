"""What the supervisor decides: pure state machines, events and the time in, actions out. No I/O, no clock, no asyncio.

One `WorkerPolicy` for each worker with kept memory, one `CommandPolicy` for each plain command, one `PartPolicy` for each other process.
"""
