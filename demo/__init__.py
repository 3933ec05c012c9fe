"""The demonstration behind `make demo`; not part of the installed package."""
