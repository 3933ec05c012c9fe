"""Compiled layers: layers of one kind share the code that torch.compile makes once. Knows no devices and no stages."""

from roundpipe.compiled.kinds import Compilations, CompiledPart, compilations
from roundpipe.compiled.options import CompileOptions, PartsToCompile, inside_of, without_wrappers
from roundpipe.compiled.rehearsals import Compiling, Rehearsal, rehearsed

__all__ = [
    "Compilations",
    "CompileOptions",
    "CompiledPart",
    "Compiling",
    "PartsToCompile",
    "Rehearsal",
    "compilations",
    "inside_of",
    "rehearsed",
    "without_wrappers",
]
