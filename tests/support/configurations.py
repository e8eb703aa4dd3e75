"""Configuration files for tests."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from quiver.pipeline.settings.load import InvalidSettings, Settings, load_settings
from quiver.pipeline.settings.options import PersistenceOptions

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
FIRST_FORM, NEWER_FORM = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
FIRST_VARIABLES = {"backend_hostname": "backend"}
NEWER_VARIABLES = {"backend": "backend.example"}
NEWER_ENVIRONMENT = {"BACKEND_TOKEN": "secret"}
STORE = "processor:persistence"
DEBUG = "exporter:debug"


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


def options_of(config: str, kind: str = STORE) -> object:
    """What a node with this configuration is told."""
    indented = textwrap.indent(textwrap.dedent(config).strip(), " " * 6)
    text = f"nodes:\n  node:\n    type: {kind}\n    config:\n{indented}\n"
    text += f"    out_ports: {{o: {{destinations: [d]}}}}\n  d: {{type: {DEBUG}}}\n"
    if kind.split(":")[-2] == "exporter":
        text = text.replace("    out_ports: {o: {destinations: [d]}}\n", "")
    return load(text).nodes["node"].options


def store_of(config: str) -> PersistenceOptions:
    bound = options_of(config)
    assert isinstance(bound, PersistenceOptions)
    return bound


def config_mistakes(config: str, kind: str = STORE) -> list[str]:
    with pytest.raises(InvalidSettings) as caught:
        options_of(config, kind)
    return [str(mistake) for mistake in caught.value.mistakes]
