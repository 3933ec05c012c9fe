"""The version of the package. pyproject.toml, `roundpipe --version` and checkpoints take it from here."""

__version__ = "0.1.0"
