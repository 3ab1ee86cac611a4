"""NVML in a process of its own, because NVML can hang or crash: readings and bad news of each GPU, sent to the supervisor.

`nvml` reads, `watch` compares one reading with the last, `process` is the loop; the
supervisor's side is `shadowsup.supervisor.node_sensor`.
"""
