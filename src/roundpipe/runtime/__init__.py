"""Carries a schedule out: devices, threads, transfers, failures."""
