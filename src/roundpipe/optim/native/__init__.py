"""The one-pass optimizer kernel: C source, its library, and what calls it."""
