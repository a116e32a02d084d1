"""The declaration of options: everything the command line, the environment and a YAML file need to know of one."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from sglang_lite.configuration import values

Text = str | None
Integer = int | None
Number = float | None
"""Types of options that may be left open."""

_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Option:
    """Metadata of a configuration field; sits in the field's ``Annotated`` type.

    Attributes:
        section: heading in ``--help``.
        help: one sentence.
        aliases: further spellings, without dashes.
        choices: allowed values after conversion.
        convert: text to value; raises ValueError.
        minimum, maximum: bounds of a number, inclusive.
        more_than: exclusive lower bound of a number.
    """

    section: str
    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    convert: values.Converter = values.text
    minimum: float | None = None
    maximum: float | None = None
    more_than: float | None = None

    def check(self, value: Any) -> Any:
        """Return ``value`` converted (when it is text) and validated.

        Raises:
            ValueError: not of the type, not a choice or out of bounds; the message names the value and what is allowed.
        """
        if value is None:
            return None
        if isinstance(value, int | float) and self.convert in values.TEXTS:
            value = str(value)  # a YAML file may hold a key or a name without quotes
        if isinstance(value, str):
            value = self.convert(value)
        if isinstance(value, list):
            return [self._checked_word(word) for word in value]
        if self.choices is not None and value not in self.choices:
            allowed = ", ".join(repr(choice) for choice in self.choices)
            raise ValueError(f"invalid choice: {value!r} (choose from {allowed})")
        if isinstance(value, int | float) and not isinstance(value, bool):
            self._check_bounds(value)
        return value

    def _checked_word(self, word: Any) -> str:
        """One of several words; a YAML file may hold an object in its place, which stays one as JSON."""
        text = json.dumps(word) if isinstance(word, dict) else word
        if not isinstance(text, str):
            raise ValueError(f"invalid value: {word!r} (must be text)")
        if self.choices is not None and text not in self.choices:
            allowed = ", ".join(repr(choice) for choice in self.choices)
            raise ValueError(f"invalid choice: {text!r} (choose from {allowed})")
        return text

    def _check_bounds(self, value: float) -> None:
        if not -_LARGEST <= value <= _LARGEST:  # also when it is not a number at all
            raise ValueError(f"invalid value: {value} (must be finite, and at most {_LARGEST})")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"invalid value: {value} (must be at least {self.minimum:g})")
        if self.more_than is not None and value <= self.more_than:
            raise ValueError(f"invalid value: {value} (must be more than {self.more_than:g})")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"invalid value: {value} (must be at most {self.maximum:g})")


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """An option together with its name and default, as the parser builder takes it."""

    name: str
    option: Option
    default: Any
    is_flag: bool = False
    spellings: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = (self.name.replace("_", "-"), *self.option.aliases)
        object.__setattr__(self, "spellings", tuple(f"--{name}" for name in names))


class OptionGroup(BaseModel):
    """Options that belong together, as fields annotated with an ``Option``; frozen, and no others are accepted."""

    # Nobody makes a group by itself: only ``ServerConfig`` pays for a validator.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)
