"""The dashboard: a client of the control protocol and of nothing else."""
