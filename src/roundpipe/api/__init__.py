"""What users touch: RoundPipe, and the engine behind it."""
