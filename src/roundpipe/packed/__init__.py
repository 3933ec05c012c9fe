"""Frozen weights in few bits: packed in host memory, on the link and in device memory, expanded where a layer computes.

`forms` knows how values become bytes and back, `module` how a module computes with packed weights, `choice` which
weights of a model are packed. `taken` has the forms of weights that come quantised, `sources` the names that their
tensors have, `taken_modules` the modules of other libraries.
"""

from roundpipe.packed.choice import checked_form, form_asked_for, num_elements, pack_frozen
from roundpipe.packed.forms import FORMS, PackedWeight
from roundpipe.packed.module import plain_state
from roundpipe.packed.taken_modules import take_quantised

__all__ = [
    "FORMS",
    "PackedWeight",
    "checked_form",
    "form_asked_for",
    "num_elements",
    "pack_frozen",
    "plain_state",
    "take_quantised",
]
