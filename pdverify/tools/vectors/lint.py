"""What is wrong with a folder of vectors: its schema first, then what no schema can say."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pdverify.tools.vectors.flags import CONVENTIONS
from pdverify.tools.vectors.folder import INPUTS_FILE, STATIC_FILES

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


def lint_vectors(folder: str | Path) -> list[str]:
    """Problems of the vectors in `folder`, each with its file and place; empty if there are none.

    Checks the JSON Schema beside the files, unknown and missing files, unique ids, that every
    input, flag and tensor exists, that values agree with their float64, one answer per valid
    token, and that a result called a convention has a flag that says which.
    """
    target = Path(folder)
    if not target.is_dir():
        return [f"{target}: no such folder"]
    schema, problems = _load(target / "schema.json")
    data, more = _load(target / INPUTS_FILE)
    problems += more
    if not isinstance(schema, dict) or not isinstance(data, dict):
        return problems or [f"{target}: a schema and a file of inputs are JSON objects"]
    schema_problems = [f"{INPUTS_FILE}{p}" for p in violations(data, "#/$defs/inputs", schema)]
    if schema_problems:
        return problems + schema_problems
    inputs: dict[str, Any] = data["inputs"]
    problems += [p for name in inputs for p in _input_problems(target, name, inputs[name])]
    seen: Counter[str] = Counter()
    used: set[str] = set()
    tensors = {entry["file"] for entry in inputs.values() if "file" in entry}
    for path in sorted(target.iterdir()):
        if path.name in {*STATIC_FILES, INPUTS_FILE, "__pycache__"} | tensors:
            continue
        if path.suffix != ".json":
            problems.append(f"{path.name}: unknown file")
            continue
        group, more = _load(path)
        more += [f"{path.name}{p}" for p in violations(group, "#/$defs/vectors", schema)]
        problems += more
        if not more:
            problems += [f"{path.name}: {p}" for p in _group_problems(path.stem, group, inputs)]
            seen.update(vector["id"] for vector in group["vectors"])
            used.update(vector["input"] for vector in group["vectors"])
    problems += [f"{name}: the id is used {n} times" for name, n in seen.items() if n > 1]
    problems += [
        f"{INPUTS_FILE}: {name} is used by no vector" for name in inputs if name not in used
    ]
    return problems if seen else [*problems, f"{target}: holds no vector"]


def violations(value: object, ref: str, schema: dict[str, Any]) -> list[str]:
    """Where `value` breaks the definition `ref` of `schema`, for the keywords used there."""
    return list(_violations(value, {"$ref": ref}, schema, ""))


def _violations(value: Any, rule: Any, schema: dict[str, Any], place: str) -> Iterator[str]:
    if rule is True:
        return
    if "$ref" in rule:
        target: Any = schema
        for step in rule["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        yield from _violations(value, target, schema, place)
        return
    if "oneOf" in rule:
        tried = [list(_violations(value, option, schema, place)) for option in rule["oneOf"]]
        matches = sum(not found for found in tried)
        if matches != 1:
            yield from min(tried, key=len) or [f"{place}: fits {matches} definitions"]
        return
    if "const" in rule and value != rule["const"]:
        yield f"{place}: {value!r}, expected {rule['const']!r}"
    if "enum" in rule and value not in rule["enum"]:
        yield f"{place}: {value!r} is none of {', '.join(map(str, rule['enum']))}"
    if "type" in rule:
        names = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
        if not any(_is(value, name) for name in names):
            yield f"{place}: {value!r:.60} is no {' or '.join(names)}"
            return
    if isinstance(value, str) and not re.search(rule.get("pattern", ""), value):
        yield f"{place}: {value!r:.60} does not match {rule['pattern']}"
    if _is(value, "number") and value < rule.get("minimum", -math.inf):
        yield f"{place}: {value} is below {rule['minimum']}"
    if isinstance(value, list):
        if len(value) < rule.get("minItems", 0):
            yield f"{place}: {len(value)} items, at least {rule['minItems']}"
        if rule.get("uniqueItems") and len({json.dumps(item) for item in value}) < len(value):
            yield f"{place}: an item is repeated"
        for i, item in enumerate(value):
            yield from _violations(item, rule.get("items", True), schema, f"{place}[{i}]")
    if isinstance(value, dict):
        for name in rule.get("required", ()):
            if name not in value:
                yield f"{place}: {name} is missing"
        for name, item in value.items():
            known = rule.get("properties", {}).get(name, rule.get("additionalProperties", True))
            if known is False:
                yield f"{place}: {name} is unknown"
            else:
                yield from _violations(item, known, schema, f"{place}.{name}")


def _is(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name])


def _load(path: Path) -> tuple[Any, list[str]]:
    """The JSON of a file, and what keeps it from being read."""
    try:
        return json.loads(path.read_text("ascii"), object_pairs_hook=_once), []
    except (OSError, ValueError, RecursionError) as error:
        return None, [f"{path.name}: not readable as JSON: {error}"]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [name for name, n in Counter(name for name, _ in pairs).items() if n > 1]
    if repeated:
        raise ValueError(f"{repeated[0]!r} is there twice")
    return dict(pairs)


def _input_problems(folder: Path, name: str, entry: dict[str, Any]) -> Iterator[str]:
    where = f"{INPUTS_FILE}: {name}"
    lead = entry["arrays"]["tokens"]["shape"]
    stored = [array["tensor"] for array in entry["arrays"].values() if "tensor" in array]
    shapes = _shapes(folder / entry.get("file", "")) if stored else {}
    for field, array in entry["arrays"].items():
        if ("values" in array) == ("tensor" in array):
            yield f"{where}.{field}: either values or a tensor"
        elif "tensor" in array:
            if shapes.get(array["tensor"]) != (array["dtype"], array["shape"]):
                yield f"{where}.{field}: {entry.get('file')} has no such tensor"
        else:
            yield from (f"{where}.{field}: {problem}" for problem in _array_problems(array))
        if array["shape"][:2] != lead:
            yield f"{where}.{field}: shape {array['shape']} does not begin with {lead}"
        if field.endswith("logits") and array["shape"][2:] != [entry["vocab_size"]]:
            yield f"{where}.{field}: shape {array['shape']}, vocab_size {entry['vocab_size']}"


def _array_problems(array: dict[str, Any]) -> Iterator[str]:
    if len(array["values"]) != math.prod(array["shape"]):
        yield f"{len(array['values'])} values, shape {array['shape']}"
    kind = {"bool": bool, "int64": int}.get(array["dtype"], str)
    wrong = [value for value in array["values"] if type(value) is not kind]
    if wrong:
        yield f"{wrong[0]!r} is no {array['dtype']}"


def _shapes(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Tensors of a safetensors file: name -> dtype and shape; empty if it cannot be read."""
    names = {"F32": "float32", "F64": "float64"}
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: (names.get(part.get_dtype(), part.get_dtype()), list(part.get_shape()))
                for name, part in slices.items()
            }
    except (OSError, SafetensorError):
        return {}


def _group_problems(stem: str, group: dict[str, Any], inputs: dict[str, Any]) -> Iterator[str]:
    if group["group"] != stem:
        yield f"group {group['group']}, but the file is {stem}"
    used = {flag for vector in group["vectors"] for flag in vector["flags"]}
    for flag in sorted(used ^ set(group["flags"])):
        yield f"flag {flag}: " + ("has no note" if flag in used else "is used by no vector")
    ids = [vector["id"] for vector in group["vectors"]]
    if ids != sorted(ids):
        yield "the vectors are not sorted by id"
    for vector in group["vectors"]:
        if not vector["id"].startswith(f"{stem}/"):
            yield f"{vector['id']}: does not begin with its group"
        if vector["input"] not in inputs:
            yield f"{vector['id']}: no input {vector['input']}"
            continue
        yield from (f"{vector['id']}: {p}" for p in _vector_problems(vector, inputs))


_SEVERAL = ("logprob-gradient", "topk-ids")
"""Quantities with more than one value per token."""


def _vector_problems(vector: dict[str, Any], inputs: dict[str, Any]) -> Iterator[str]:
    valid = sum(inputs[vector["input"]]["arrays"]["response_mask"]["values"])
    expected, keep = vector["expected"], vector["quantity"] == "keep"
    if vector["quantity"] not in _SEVERAL and len(expected) != valid:
        yield f"{len(expected)} values for {valid} valid tokens"
    for name in ("nearest", "budget_per_unit"):
        if vector.get(name) is not None and len(vector[name]) != len(expected):
            yield f"{name} has {len(vector[name])} entries, expected {len(expected)}"
            return
    for t, (text, near) in enumerate(zip(expected, vector.get("nearest") or [], strict=False)):
        if (text is None) != (near is None):
            yield f"token {t}: {text} and {near}"
        elif text is not None and float(Decimal(text)) != float.fromhex(near):
            yield f"token {t}: {near} is not the float64 nearest to {text}"
    excepted = [t for entry in vector["exceptions"] for t in entry["tokens"]]
    for t in excepted:
        if t >= len(expected) or excepted.count(t) > 1:
            yield f"exceptions: token {t} is out of range or there twice"
    for t, answer in enumerate(expected):
        if t not in excepted and (answer is None or answer == "inf"):
            yield f"token {t}: {answer} binds nobody, but is no exception"
        if t not in excepted and vector.get("budget_per_unit") and not keep:
            limit = vector["budget_per_unit"][t]
            if limit is None:
                yield f"token {t}: any error is allowed, but it is no exception"
    called = {vector["result"], *(entry["result"] for entry in vector["exceptions"])}
    if "convention" in called and CONVENTIONS.isdisjoint(vector["flags"]):
        yield "a convention without a flag that names it"
