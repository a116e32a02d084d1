"""The library's text of a grammar, made smaller: what it keeps and loads grows with rules times the size of them all.

Rules that say the same white space become one, and a rule that is used once, as a part of a sequence, is written where
it is used. A schema of 200 required properties takes a tenth of the room and of the time.
"""

from __future__ import annotations

import re

_RULE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*) ::= (.*)")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|[A-Za-z_][A-Za-z0-9_]*|[()|]')
"""Strings and character classes are skipped as a whole; what is left are names and structure."""

_WHITE_SPACE = frozenset([r"(([ \n\r\t]))", r'("" | ([ \n\r\t]))'])
_ROOT = "root"


def simplified(text: str) -> str:
    """The same grammar with fewer rules."""
    rules = _read(text)
    if rules is None:
        return text
    rules = _with_shared_white_space(rules)
    rules = _with_sequences_in_place(rules)
    return "".join(f"{name} ::= {body}\n" for name, body in rules.items())


def _read(text: str) -> dict[str, str] | None:
    """Bodies by name; None when the text is not what the library writes."""
    rules: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        found = _RULE.fullmatch(line)
        if found is not None and found[1] not in rules:
            name = found[1]
            rules[name] = found[2]
        elif name and found is None:
            rules[name] += f"\n{line}"
        else:
            return None
    return rules if _ROOT in rules else None


def _with_shared_white_space(rules: dict[str, str]) -> dict[str, str]:
    first: dict[str, str] = {}
    other: dict[str, str] = {}
    for name, body in rules.items():
        if body in _WHITE_SPACE and name != _ROOT:
            kept = first.setdefault(body, name)
            if kept != name:
                other[name] = kept
    return {
        name: _TOKEN.sub(lambda found: other.get(found[0], found[0]), body)
        for name, body in rules.items()
        if name not in other
    }


def _with_sequences_in_place(rules: dict[str, str]) -> dict[str, str]:
    uses: dict[str, int] = {}
    repeated: set[str] = set()
    order: dict[str, list[str]] = {}
    for name, body in rules.items():
        order[name] = []
        for found in _TOKEN.finditer(body):
            if found[0] in rules:
                uses[found[0]] = uses.get(found[0], 0) + 1
                order[name].append(found[0])
                if body[found.end() : found.end() + 1] in ("{", "*", "+", "?"):
                    repeated.add(found[0])
    sequences = {
        name: sequence
        for name, body in rules.items()
        if name != _ROOT and uses.get(name) == 1 and name not in repeated and (sequence := _sequence(body)) is not None
    }
    done: dict[str, str] = {}

    def put(name: str) -> None:
        body = sequences.get(name, rules[name])
        done[name] = _TOKEN.sub(lambda found: done[found[0]] if found[0] in sequences else found[0], body)

    for start in rules:
        # Depth first without recursion: a chain has a link for every property.
        pending = [start]
        while pending:
            name = pending[-1]
            missing = [used for used in order[name] if used in sequences and used not in done]
            if name in done or not missing:
                pending.pop()
                if name not in done:
                    put(name)
            elif missing[0] in pending:
                return rules  # a circle that nothing leads to
            else:
                pending.append(missing[0])
    return {name: done[name] for name in rules if name not in sequences}


def _sequence(body: str) -> str | None:
    """What ``((...))`` holds when that is one sequence, so that it can stand in another one as it is."""
    if not body.startswith("((") or not body.endswith("))") or "\n" in body:
        return None
    inner, depth = body[2:-2], 0
    for found in _TOKEN.finditer(inner):
        if found[0] == "(":
            depth += 1
        elif found[0] == ")":
            depth -= 1
        elif found[0] == "|" and depth == 0:
            return None
        if depth < 0:
            return None
    return inner if depth == 0 else None
