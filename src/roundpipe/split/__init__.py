"""Splits a model with a repeated list of blocks, such as a transformers model, into layers that compute the same."""
