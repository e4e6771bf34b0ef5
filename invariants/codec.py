"""Evidence as JSON text and back; nothing is unpickled."""

from __future__ import annotations

import json

import cattrs

from invariants.case import Case
from invariants.evidence import Evidence


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(Case, str)
    converter.register_structure_hook(Case, lambda text, _: Case.parse(text))
    return converter


_CONVERTER = _converter()


def dumps(evidence: Evidence) -> str:
    """Write; NaN and infinities as Python's JSON spells them."""
    return json.dumps(_CONVERTER.unstructure(evidence))


def loads(text: str) -> Evidence:
    """Read what `dumps` wrote."""
    return _CONVERTER.structure(json.loads(text), Evidence)
