"""Configuration files for tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from quiver.pipeline.settings.load import InvalidSettings, Settings, load_settings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
FIRST_FORM, NEWER_FORM = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
FIRST_VARIABLES = {"backend_hostname": "backend"}
NEWER_VARIABLES = {"backend": "backend.example"}
NEWER_ENVIRONMENT = {"BACKEND_TOKEN": "secret"}


def load(
    text: str,
    environment: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Settings:
    return load_settings(
        text, source="p.yaml", environment=environment or {}, variables=variables or {}
    )


def mistakes(
    text: str,
    environment: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> list[str]:
    """The mistakes of a text as lines; none when it is fine."""
    try:
        load(text, environment, variables)
    except InvalidSettings as error:
        return str(error).splitlines()
    return []


def only_mistake(text: str, **outside: Mapping[str, str]) -> str:
    """The one mistake of a text."""
    found = mistakes(text, **outside)
    assert len(found) == 1, found
    return found[0]


def graph(**nodes: str) -> str:
    """A file of nodes: ``a="receiver:otlp -> b, c | listening_addr: 127.0.0.1:0"``."""
    lines = ["nodes:"]
    for name, text in nodes.items():
        rest, _, config = text.partition("|")
        kind, _, destinations = rest.partition("->")
        lines += [f"  {name}:", f"    type: {kind.strip()}", f"    config: {{{config.strip()}}}"]
        if destinations:
            lines.append(f"    out_ports: {{out: {{destinations: [{destinations.strip()}]}}}}")
    return "\n".join(lines)
