"""The largest picture, and the largest numbers that a flag or a key of a configuration takes."""

from __future__ import annotations

# Of a picture: Pillow's own limit, a quarter of a gigabyte as RGB.
MAX_PIXELS = 89_478_485

# No machine has more processors, and a system that is asked for more threads ends the process.
_MOST_WORKERS = 1024
_MOST = {"threads": _MOST_WORKERS, "workers": _MOST_WORKERS, "seed": 2**63 - 1, "max_pixels": 2**63 - 1}


def most(name: str) -> int:
    """The largest whole number that the flag or key ``name`` takes, by its name in Python."""
    return _MOST.get(name, 2**31 - 1)
