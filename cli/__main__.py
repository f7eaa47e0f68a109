"""``python -m fnpipe.cli``: the form that torchrun starts."""

from fnpipe.cli.main import main

main()
