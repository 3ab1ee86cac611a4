"""``python -m shadowsup.supervisor.cli``."""

from shadowsup.supervisor.cli import main

main()
