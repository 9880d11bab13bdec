"""Where a run may lie, and the master that will see it."""

from collections.abc import Callable, Mapping
from pathlib import Path

from recipe.errors import Refused
from recipe.files import real
from tools import site
from tools.driver import remote


def master(paths: Mapping[str, Path], say: Callable[[str], None], then: str = "") -> remote.Master:
    """The master of this site, once it is sure that an experiment could start there and would see ``paths``, by name.

    Raises:
        Refused: values of the site that do not agree, no login, no such workspace, or a path that no experiment would see.
    """
    here = site.agreed()
    for what, path in paths.items():
        if not real(path).is_relative_to(here.mount):
            raise Refused(
                f"{what} {real(path)} is not below {here.mount}, the one folder that experiments see (mount in "
                f"site.yaml); put it there{then}"
            )
    found = remote.connect(say=say)
    found.project(here.workspace, here.project)
    return found
