"""The dashboard and the config editor. A client of the control socket and nothing more: whatever becomes of it, the node goes on.

What it knows comes in as observations (`feed`), is kept by `story`, and is shown by one screen for each feature; orders go out the same
way as those of the command line.
"""
