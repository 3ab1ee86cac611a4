"""``shadowsup completion``."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print what SHELL needs to complete verbs, options, workers and engines.

    \b
    eval "$(shadowsup completion bash)"      # in ~/.bashrc
    eval "$(shadowsup completion zsh)"       # in ~/.zshrc
    shadowsup completion fish > ~/.config/fish/completions/shadowsup.fish
    """
    from click.shell_completion import ShellComplete, get_completion_class

    from shadowsup.supervisor.cli.app import cli

    found = get_completion_class(shell)
    assert found is not None
    # The base class's: bash's own asks the bash in PATH for its version first, which need not be the one that reads this.
    click.echo(ShellComplete.source(found(cli, {}, "shadowsup", "_SHADOWSUP_COMPLETE")))
