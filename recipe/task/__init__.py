"""Task families: what one is made of, and which ones there are.

A family is a package ``recipe/NAME`` with a :class:`~recipe.task.family.Family` called ``FAMILY``; its name stands in
:data:`FAMILIES` and, as ``task: NAME``, in a configuration. Nothing outside these packages knows of orders or invoices.
"""

from importlib import import_module

from recipe.task.family import Family

FAMILIES = ("orders", "invoices")  # the first is the default


def family(name: str) -> Family:
    """The family of that name."""
    return import_module(f"recipe.{name}").FAMILY
