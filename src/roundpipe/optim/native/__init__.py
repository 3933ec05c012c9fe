"""The one-pass optimizer kernel: its C source, the loader of the compiled library, and the Python interface."""
