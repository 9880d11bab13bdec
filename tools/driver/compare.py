"""How two plain documents differ, place by place."""

from collections.abc import Iterator

from recipe.records import short

UNCHECKED = "not checked: "  # begins a line about what could not be compared
_ABSENT = object()


def differences(recorded, found, where: str, whose: str = "the run") -> Iterator[str]:
    """The places where two plain documents differ, named; ``whose`` word ``found`` is."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in sorted(recorded.keys() | found.keys()):
            place = f"{where}.{key}" if ":" in where else f"{where}: {key}"
            yield from differences(recorded.get(key, _ABSENT), found.get(key, _ABSENT), place, whose)
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for number, (one, other) in enumerate(zip(recorded, found)):
            name = other.get("name", number) if isinstance(other, dict) else number
            yield from differences(one, other, f"{where}[{name}]", whose)
    elif recorded != found or type(recorded) is not type(found):  # 1, 1.0 and True are equal in Python
        yield f"{where} is {_short(recorded)}, {whose} says {_short(found)}"


def _short(value) -> str:
    return "absent" if value is _ABSENT else short(value)
