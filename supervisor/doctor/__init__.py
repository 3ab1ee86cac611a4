"""Is this machine fit, and what to do about what is not: checks that look and change nothing, each with its evidence and its remedy.

A check is a function from (`machine.Machine`, `finding.Wants`) to findings; `registry.CHECKS` lists them.
"""
