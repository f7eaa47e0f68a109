"""``python -m fnpipe.cli``: the form that torchrun starts."""

from fnpipe.cli.app import main

main()
