"""The reference of the HTTP API, from the server's own OpenAPI document."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tlora.service.app import ROUTERS

_TITLES = {
    "jobs": "Jobs",
    "files": "Files",
    "streams": "Events, metrics, logs and adapters",
    "bases": "Base models",
    "cluster": "The cluster",
    "keys": "Keys",
    "openai": "OpenAI's routes",
    "health": "Health",
    "page": "The page",
}
_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "maxLength": "at most {} characters",
    "maxItems": "at most {}",
}


def http_api() -> str:
    app = FastAPI(title="tlora")
    for router in ROUTERS:
        app.include_router(router)
    document = get_openapi(title="tlora", version="1", routes=app.routes)
    schemas = document["components"]["schemas"]
    by_tag: dict[str, list[str]] = {}
    bodies: list[str] = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault(operation["tags"][0], []).append(_row(method, path, operation))
            bodies += [name for name in _json_bodies(operation) if name not in bodies]
    tables = [
        f"## {_TITLES[tag]}\n\n| route | parameters | what it does |\n| --- | --- | --- |\n" + "\n".join(by_tag.pop(tag)) for tag in _TITLES
    ]
    assert not by_tag, f"tags without a title: {sorted(by_tag)}"
    return "\n\n".join([*tables, "## Bodies", *(_body(name, schemas) for name in _with_parts(bodies, schemas))])


def _row(method: str, path: str, operation: dict[str, Any]) -> str:
    parameters = ", ".join(f"`{each['name']}`" for each in operation.get("parameters", []) if each["in"] != "path")
    body = "; ".join([f"body: [{name}](#{name.lower()})" for name in _json_bodies(operation)] or _forms(operation))
    text = operation.get("description") or operation["summary"]
    return f"| `{method.upper()} {path}` | {_cell('; '.join(part for part in (parameters, body) if part))} | {_cell(text)} |"


def _json_bodies(operation: dict[str, Any]) -> list[str]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    reference = content.get("schema", {}).get("$ref")
    return [reference.rpartition("/")[2]] if reference and not reference.rpartition("/")[2].startswith("Body_") else []


def _forms(operation: dict[str, Any]) -> list[str]:
    return (
        ["body: a form with `file` and `purpose`"] if "multipart/form-data" in operation.get("requestBody", {}).get("content", {}) else []
    )


def _with_parts(names: list[str], schemas: dict[str, Any]) -> list[str]:
    """The bodies, and every schema that one of them holds, in the order in which they are met."""
    found: list[str] = []
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        if name not in found:
            found.append(name)
            waiting += _references(schemas[name].get("properties", {}))
    return found


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"].rpartition("/")[2]] if "$ref" in node else []
        return own + [name for value in node.values() for name in _references(value)]
    return [name for value in node for name in _references(value)] if isinstance(node, list) else []


def _body(name: str, schemas: dict[str, Any]) -> str:
    schema = schemas[name]
    required = schema.get("required", [])
    rows = [
        f"| `{field}` | {_cell(_type(each))} | {'required' if field in required else _default(each)} |"
        for field, each in schema.get("properties", {}).items()
    ]
    return f"### {name}\n\n| field | type | default |\n| --- | --- | --- |\n" + "\n".join(rows)


def _default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    return "" if value is None else f"`{value}`".replace("|", "\\|")


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        kind = f"list of {_type(schema.get('items', {}))}"
    limits = [words.format(f"{schema[key]:,}") for key, words in _LIMITS.items() if key in schema]
    return ", ".join([kind, *limits])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
