"""Names in a configuration file that stand for values from outside.

====================  ==========================================================================
written               becomes
====================  ==========================================================================
``{{name}}``          the variable, as ``--set name=value`` gives it
``${env:NAME}``       the environment variable
``${env:NAME:-text}`` the environment variable, or the text when it is not set or empty
``$${``               ``${``
====================  ==========================================================================

Values are put into single values of the parsed file. They cannot add keys, and names in them stay
as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from quiver.pipeline.settings.mistakes import Mistakes, Place, nearest, quoted

_NAME: Final = re.compile(
    r"\$\$\{"
    r"|\{\{\s*(?P<variable>[^{}\s]*)\s*\}\}"
    r"|\$\{env:(?P<environment>[^{}:\s]*)(?::-(?P<default>[^{}]*))?\}"
    r"|\$\{(?P<bare>[A-Za-z_]\w*)\}"
)


class Substitution:
    """Replaces names, and remembers which variables were used."""

    def __init__(
        self, environment: Mapping[str, str], variables: Mapping[str, str], mistakes: Mistakes
    ) -> None:
        self._environment = environment
        self._variables = variables
        self._mistakes = mistakes
        self._used: set[str] = set()

    def __call__(self, text: str, place: Place) -> str | None:
        """The text with all names replaced; None, and a mistake, when one is missing."""
        if "{" not in text:
            return text
        complete = True

        def replaced(match: re.Match[str]) -> str:
            nonlocal complete
            value = self._value(match, place)
            complete = complete and value is not None
            return value or ""

        result = _NAME.sub(replaced, text)
        return result if complete else None

    def warn_of_unused(self, source: str) -> None:
        """Variables that were given and that the file does not name."""
        for name in self._variables:
            if name not in self._used:
                self._mistakes.warn(
                    Place(source),
                    f"variable {quoted(name)} is given, but {{{{{name}}}}} is not used",
                )

    def _value(self, match: re.Match[str], place: Place) -> str | None:
        if match["variable"] is not None:
            return self._variable(match["variable"], place)
        if match["environment"] is not None:
            return self._from_environment(match["environment"], match["default"], place)
        if match["bare"] is not None:
            name = match["bare"]
            self._mistakes.add(
                place,
                f"${{{name}}} names nothing",
                f"write ${{env:{name}}} for the environment, $${{{name}}} for the text itself",
            )
            return None
        return "${"

    def _variable(self, name: str, place: Place) -> str | None:
        self._used.add(name)
        value = self._variables.get(name)
        if value is None:
            close = nearest(name, self._variables)
            meant = f"did you mean {{{{{close}}}}}? " if close else ""
            self._mistakes.add(
                place,
                f"variable {quoted(name)} has no value",
                f"{meant}give it with --set {name or 'name'}=...",
            )
        return value

    def _from_environment(self, name: str, default: str | None, place: Place) -> str | None:
        value = self._environment.get(name)
        if default is not None:
            return value or default
        if value is None:
            self._mistakes.add(
                place,
                f"environment variable {quoted(name)} is not set",
                f"set it, or give a default as ${{env:{name}:-text}}",
            )
        return value
