"""Evidence as JSON text and back; nothing is unpickled."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import cattrs

from invariants.case import Case
from invariants.communication import Operation
from invariants.evidence import Evidence, Posted

_OWN = ("number", "turn", "batch", "flags", "posted", "completed")
"""What tells one operation of a rank from the next; the rest is the same in each step, and stored once."""
_COMMON = tuple(field.name for field in fields(Operation) if field.name not in _OWN)


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(Case, str)
    converter.register_structure_hook(Case, lambda text, _: Case.parse(text))
    converter.register_unstructure_hook_func(_is_communication, _packed)
    converter.register_structure_hook_func(_is_communication, lambda packed, _: _unpacked(packed))
    return converter


def _is_communication(kind: object) -> bool:
    return kind == tuple[Posted, ...]


def _packed(communication: tuple[Posted, ...]) -> dict[str, Any]:
    """As a list of kinds of operations, and rows of rank, step, inside, resumed and [kind, what is its own] each."""
    kinds: dict[tuple[Any, ...], int] = {}
    rows = []
    for posted in communication:
        operations = []
        for operation in posted.operations:
            common = tuple(getattr(operation, name) for name in _COMMON)
            own = (getattr(operation, name) for name in _OWN)
            operations.append([kinds.setdefault(common, len(kinds)), *own])
        rows.append([posted.rank, posted.step, posted.inside, posted.resumed, operations])
    return {"kinds": list(kinds), "rows": rows}


def _unpacked(packed: dict[str, Any]) -> tuple[Posted, ...]:
    kinds = [dict(zip(_COMMON, map(_tuples, kind), strict=True)) for kind in packed["kinds"]]
    communication = []
    for rank, step, inside, resumed, rows in packed["rows"]:
        operations = (Operation(**kinds[kind], **dict(zip(_OWN, own, strict=True))) for kind, *own in rows)
        communication.append(Posted(rank, step, inside, resumed, tuple(operations)))
    return tuple(communication)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_CONVERTER = _converter()


def dumps(evidence: Evidence) -> str:
    """Write; NaN and infinities as Python's JSON spells them."""
    return json.dumps(_CONVERTER.unstructure(evidence))


def loads(text: str) -> Evidence:
    """Read what `dumps` wrote."""
    return _CONVERTER.structure(json.loads(text), Evidence)
