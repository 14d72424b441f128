"""JSON schemas of data types: what `to_builtins` writes, derived properties included."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache, reduce
from itertools import pairwise
from operator import or_
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from trimtab.spec.base import Noun

if TYPE_CHECKING:
    from collections.abc import Sequence

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def build_schema(title: str, nouns: Sequence[type[Noun]]) -> dict[str, Any]:
    """Return the schema of JSON that is one of some data types.

    It allows further keys: later versions may add some.
    """
    forms = [make_json_form(noun) for noun in nouns]
    outputs, parts = msgspec.json.schema_components(forms, ref_template="#/$defs/{name}")
    for part in parts.values():
        part.pop("additionalProperties", None)
    return {"$schema": DIALECT, "title": title, "anyOf": list(outputs), "$defs": parts}


def find_output(value: Any, nouns: Sequence[type[Noun]]) -> type[Noun]:
    """Return the first data type whose JSON a plain value is; raise ValueError if it is none of them.

    >>> from trimtab.spec import Reason
    >>> find_output({"subject": "gpus", "value": "1", "why": "it fits"}, [Reason]).__name__
    'Reason'
    """
    faults = []
    for noun in nouns:
        try:
            msgspec.convert(value, make_json_form(noun))
        except msgspec.ValidationError as error:
            faults.append(f"{noun.__name__}: {error}")
        else:
            return noun
    raise ValueError("; ".join(faults))


@cache
def make_json_form(noun: type[Noun]) -> type[msgspec.Struct]:
    """Return a struct with the keys that the JSON of a data type has, all of them required."""
    hints, docs = get_type_hints(noun), _read_field_docs(noun)
    fields: list[Any] = []
    for name, key in zip(noun.__struct_fields__, noun.__struct_encode_fields__, strict=True):
        hint = _describe(_to_json_type(hints[name]), docs.get(name, ""))
        fields.append(
            (name, hint | msgspec.UnsetType, msgspec.field(default=msgspec.UNSET, name=key))
            if name in noun.may_lack
            else (name, hint, msgspec.field(name=key))
        )
    for name in noun.derived:
        getter = getattr(noun, name).fget
        module = vars(sys.modules[getter.__module__])
        hint = get_type_hints(getter, globalns=module)["return"]
        fields.append((name, _describe(_to_json_type(hint), inspect.getdoc(getter) or "")))
    form = msgspec.defstruct(noun.__name__, fields, kw_only=True, forbid_unknown_fields=True)
    form.__doc__ = (inspect.getdoc(noun) or "").split("\n\n")[0]
    return form


def _describe(hint: Any, text: str) -> Any:
    words = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    return Annotated[hint, msgspec.Meta(description=words)] if words else hint


def _to_json_type(hint: Any) -> Any:
    """Return a type with its data types replaced by their JSON forms."""
    hint = getattr(hint, "__value__", hint)
    if isinstance(hint, type) and issubclass(hint, Noun):
        return make_json_form(hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return reduce(or_, map(_to_json_type, inner))
    if origin in (tuple, list, dict):
        return origin[tuple(part if part is Ellipsis else _to_json_type(part) for part in inner)]
    return hint


@cache
def _read_field_docs(noun: type[Noun]) -> dict[str, str]:
    """Return the text below each field in the source of a data type and of those it extends."""
    docs: dict[str, str] = {}
    for owner in reversed([cls for cls in noun.__mro__ if issubclass(cls, Noun) and cls is not Noun]):
        tree = ast.parse(inspect.getsource(sys.modules[owner.__module__]))
        body = next(
            node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner.__name__
        )
        for field, text in pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                docs[field.target.id] = str(text.value.value)
    return docs
