"""Trainer classes of transformers and TRL that train through RoundPipe."""
