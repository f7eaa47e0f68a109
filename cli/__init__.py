"""The command line; it offers nothing to import: every command calls a function of another package."""

__all__: list[str] = []
