"""`megajax schema > megajax.schema.json`: the config's JSON schema, for editors."""

import json
import sys
from typing import Any

from megajax.command_parser import CommandParser
from megajax.console import user_errors
from megajax.schema.config import Config


def main(argv: list[str]) -> int:
    """Print the schema; the exit status."""
    parser = CommandParser(
        "megajax.config.json_schema",
        description="Print the JSON schema of config files. Editors use it to complete and check keys.",
    )
    with user_errors():
        parser.parse_args(argv)
        print(json.dumps(json_schema(), indent=1))
    return 0


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config file.

    No key is required, since an included file or the command line may set it, and a section may be empty.
    """
    schema = Config.model_json_schema()
    for definition in (schema, *schema["$defs"].values()):
        definition.pop("required", None)
        definition.pop("title", None)
        for key, field in definition.get("properties", {}).items():
            definition["properties"][key] = _field(field)
    include = {
        "description": "File or files that are read before this one; paths are relative to this file.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    return schema | {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "megajax config",
        "description": "A run of megajax.",
        "properties": {"include": include} | schema["properties"],
    }


def _field(field: dict[str, Any]) -> dict[str, Any]:
    """A key's schema; derived keys and subsections also accept null, and a derived key's description has the rule."""
    rule = field.pop("derived", None)
    field.pop("title", None)
    if rule is None and "$ref" not in field and field.get("type") != "object":
        return field
    shown = [field.pop("description", "")] + [f"Default: {rule}."] * bool(rule)
    field.pop("default", None)
    return {"description": " ".join(filter(None, shown)), "anyOf": [field, {"type": "null"}]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
