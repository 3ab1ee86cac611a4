"""The node's supervisor: policy, process life, detectors, vault, control socket, gateway and command line. No CUDA, no torch."""
