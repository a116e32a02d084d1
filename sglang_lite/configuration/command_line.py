"""The command line of ``serve``: an argparse parser made from the option declarations.

argparse gives the ``--flag=value`` form, unique-prefix abbreviations and the wording of errors; what it does not know
is kept as unknown flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sglang_lite.configuration import values
from sglang_lite.configuration.compatibility import POINTERS, KnownOption, known_options
from sglang_lite.configuration.option import OptionSpec

PROGRAM = "sglang-lite serve"
_KNOWN_PREFIX = "known:"


@dataclass(slots=True)
class ParsedOptions:
    """What one source (command line or YAML file) says.

    Attributes:
        fields: option name with underscores -> converted value.
        ignored: known option without effect, with dashes -> value.
        unknown: unknown option, with dashes -> its word, or True.
        config_file: the ``--config`` path, or None.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str | bool] = field(default_factory=dict)
    config_file: str | None = None


class ConfigurationError(Exception):
    """An option that cannot be used; the message names it and its value."""


class OptionParser(argparse.ArgumentParser):
    """argparse without the 500-option usage text in front of every error."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        self.exit(2, f"{self.prog}: error: {message}\nRun '{self.prog} --help' for the options.\n")


def build_parser(specs: Sequence[OptionSpec]) -> OptionParser:
    """A parser of all options in ``specs`` and of the known ones without an implementation (hidden in the help)."""
    parser = OptionParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [MODEL] [options]",
        description="Serve a model over HTTP. Options can also come from SGLANG_LITE_<NAME> in the environment and "
        "from a YAML file; the command line wins over the environment, and that over the file.",
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.HelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options, keys as the option names.")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for spec in specs:
        group = groups.get(spec.option.section)
        if group is None:
            group = groups[spec.option.section] = parser.add_argument_group(spec.option.section)
        _add_option(group, spec)
    for known in known_options():
        _add_known(parser, known)
    for name in POINTERS:
        parser.add_argument(f"--{name}", dest=f"{_KNOWN_PREFIX}{name}", nargs="?", help=argparse.SUPPRESS)
    return parser


def parse_arguments(parser: OptionParser, arguments: Sequence[str]) -> ParsedOptions:
    """Parse the words after ``serve``; a first word without a dash is the model path. Errors exit with 2."""
    words = list(arguments)
    positional = words.pop(0) if words and not words[0].startswith("-") else None
    if sum(word == "--config" or word.startswith("--config=") for word in words) > 1:
        parser.error("argument --config: given more than once")
    namespace, rest = parser.parse_known_args(words)
    result = ParsedOptions(unknown=_unknown_flags(parser, rest))
    if positional is not None:
        result.fields["model_path"] = positional
    for name, value in vars(namespace).items():
        if name == "config":
            result.config_file = value
        elif name.startswith(_KNOWN_PREFIX):
            try:
                note_known(result, name.removeprefix(_KNOWN_PREFIX), value)
            except ConfigurationError as error:
                parser.error(str(error))
        else:
            result.fields[name] = value
    return result


def note_known(result: ParsedOptions, name: str, value: Any) -> None:
    """Record a known option without an implementation, or refuse it.

    Raises:
        ConfigurationError: the option is rejected or refused; the message says why and what to do.
    """
    if name in POINTERS:
        raise ConfigurationError(f"argument --{name}: not an option of sglang-lite: {POINTERS[name]}")
    known = _BY_NAME[name]
    if not known.refused:
        result.ignored[known.name] = value
    elif not known.is_default(value):
        raise ConfigurationError(f"argument --{known.name}: not supported by sglang-lite; remove it")


def find_known(name: str) -> KnownOption | None:
    """The known option without an implementation that is called ``name`` (with dashes)."""
    return _BY_NAME.get(name)


def _index() -> dict[str, KnownOption]:
    return {name: known for known in known_options() for name in (known.name, *known.aliases)}


_BY_NAME = _index()


def _add_option(group: argparse._ArgumentGroup, spec: OptionSpec) -> None:
    option = spec.option
    text = option.help.replace("%", "%%")
    if spec.is_flag:
        negative = [f"--no-{spelling.removeprefix('--')}" for spelling in spec.spellings]
        group.add_argument(*spec.spellings, dest=spec.name, action="store_true", help=text)
        group.add_argument(*negative, dest=spec.name, action="store_false", help=argparse.SUPPRESS)
        return
    if option.choices is not None:
        text += f" One of: {', '.join(option.choices)}."
    if spec.default is not None:
        text += f" (default: {spec.default})"
    if option.convert is values.words:
        group.add_argument(*spec.spellings, dest=spec.name, nargs="*", metavar="TEXT", help=text)
        return
    group.add_argument(
        *spec.spellings, dest=spec.name, type=_argument_type(option.check), metavar=_metavar(option.convert), help=text
    )


def _add_known(parser: OptionParser, known: KnownOption) -> None:
    destination = f"{_KNOWN_PREFIX}{known.name}"
    match known.kind:
        case "flag":
            parser.add_argument(*known.spellings, dest=destination, action="store_true", help=argparse.SUPPRESS)
        case "pair":
            positive = [spelling for spelling in known.spellings if not spelling.startswith("--no-")]
            negative = [spelling for spelling in known.spellings if spelling.startswith("--no-")]
            parser.add_argument(*positive, dest=destination, action="store_true", help=argparse.SUPPRESS)
            parser.add_argument(*negative, dest=destination, action="store_false", help=argparse.SUPPRESS)
        case _:
            parser.add_argument(
                *known.spellings,
                dest=destination,
                type=_argument_type(known.convert),
                nargs="*" if known.kind == "words" else None,
                help=argparse.SUPPRESS,
            )


def _argument_type(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Give argparse the converter's own message instead of a generic one."""

    def checked(value: str) -> Any:
        try:
            return convert(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _metavar(convert: values.Converter) -> str:
    numbers = (values.integer, values.human_integer, values.port)
    if convert in numbers:
        return "N"
    if convert is values.number:
        return "X"
    return "JSON" if convert is values.json_object else "TEXT"


def _unknown_flags(parser: OptionParser, rest: Sequence[str]) -> dict[str, str | bool]:
    """Unknown options, each with the word after it when that is no option itself."""
    unknown: dict[str, str | bool] = {}
    current: str | None = None
    for word in rest:
        if word.startswith("-") and not _is_negative_number(word):
            name, separator, value = word.lstrip("-").partition("=")
            unknown[name] = value if separator else True
            current = None if separator else name
        elif current is not None:
            unknown[current] = word
            current = None
        else:
            parser.error(f"unrecognized arguments: {word}")
    return unknown


def _is_negative_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
