"""Words of the scripted policies of all families."""

from recipe.policy.chat import CALL, END_CALL

REPORT = "Das Ergebnis liegt vor."
HURRY = "Das geht auch schneller."


def call(tool: str, **arguments: str) -> str:
    inside = ", ".join(f'"{name}": "{value}"' for name, value in arguments.items())
    return f'{CALL}\n{{"name": "{tool}", "arguments": {{{inside}}}}}\n{END_CALL}'


def answer(number: int) -> str:
    return f"<answer>{number}</answer>"
