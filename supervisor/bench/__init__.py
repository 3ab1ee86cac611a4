"""Measuring the project's claims on the machine at hand: a node of one's own, clients that note each arrival, and kills."""
