"""The demo that `make demo` runs; not part of the installed package."""
