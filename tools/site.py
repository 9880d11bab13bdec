"""Writes the values of determined_configs/site.yaml into every configuration beside it.

    python -m tools.site           # after editing site.yaml
    python -m tools.site --check   # says whether they agree; exit code 1 if not

A line that holds a site value ends with "# site: KEY"; nothing else in a file is touched. So each configuration
stays complete in itself, as "det experiment create" wants it, and its comments stay.
"""

import argparse
import re
import sys
from pathlib import Path

from recipe.errors import CheckFailed, Refused
from recipe.files import write_bytes
from recipe.records import content, read_yaml
from recipe.run.entrypoint import guarded

FOLDER = Path(__file__).resolve().parents[1] / "determined_configs"
# A key's value, a variable's, or a flag's in the command that a head names.
_LINE = re.compile(
    r"^(?P<head>\s*(?:- )?(?:\w+: |\w+=)|# .* --\w+ )(?P<value>\S+)(?P<tail>(?: .*)?\s+# site: (?P<key>\w+))$", re.MULTILINE
)


def rewritten(text: str, values: dict[str, str], where: str) -> str:
    """``text`` with the site's values in its marked lines.

    Raises:
        Refused: a marked key that the site does not have.
    """

    def line(match: re.Match) -> str:
        if match["key"] not in values:
            raise Refused(f"{where} wants the site value {match['key']}, which site.yaml does not have")
        return f"{match['head']}{values[match['key']]}{match['tail']}"

    return _LINE.sub(line, text)


def apply(folder: Path, check: bool) -> None:
    """Rewrite, or only compare, all configurations in ``folder``."""
    values = read_yaml(dict[str, str], folder / "site.yaml", "the site's values")
    for path in sorted(folder.glob("*.yaml")):
        if path.name == "site.yaml":
            continue
        text = content(path, "a configuration").decode()
        wanted = rewritten(text, values, path.name)
        if wanted != text and check:
            raise CheckFailed(f"{path.name} does not have the values of site.yaml; run python -m tools.site")
        if wanted != text:
            write_bytes(path, wanted.encode())
            print(f"{path.name}: rewritten")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.site", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    return guarded(lambda: apply(FOLDER, arguments.check))


if __name__ == "__main__":
    sys.exit(main())
