"""Splits a model of transformers (or one with a repeated list of blocks) into layers that compute the same numbers."""
