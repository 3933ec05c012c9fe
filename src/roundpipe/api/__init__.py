"""The classes that users call, RoundPipe and AutoRoundPipe, and the engine that carries out their calls."""
