"""Imports every module that registers commands, in the order in which ``--help`` lists them."""

from fnpipe.cli.commands import data, demo, embed, graph, mine, report, train

__all__ = ["data", "demo", "embed", "graph", "mine", "report", "train"]
