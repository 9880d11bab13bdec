"""Writes the values of determined_configs/site.yaml into every configuration beside it.

    python -m tools.site           # after editing site.yaml
    python -m tools.site --check   # says whether they agree; exit code 1 if not

A line that holds a site value ends with "# site: KEY"; nothing else in a file is touched. So each configuration
stays complete in itself, as "det experiment create" wants it, and its comments stay.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from recipe.errors import CheckFailed, Refused
from recipe.files import write_bytes
from recipe.records import content, read_yaml
from recipe.run.entrypoint import guarded

FOLDER = Path(__file__).resolve().parents[1] / "determined_configs"
VALUES = "site.yaml"
_MARKED = re.compile(r"^(?P<line>.*?)(?P<mark>\s+# site: (?P<key>\w+)[ \t\r]*)$", re.MULTILINE)
_KEY = re.compile(r"(?P<head>\s*(?:- )?\w+: ).*")
_VARIABLE = re.compile(r"(?P<head>\s*- )['\"]?(?P<name>\w+)=.*")
_FLAG = r"(?P<head># .*--{key} )(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+(?P<tail>( .*)?)"  # in the command that a head names


@dataclass(frozen=True)
class Site:
    """``site.yaml``."""

    workspace: str
    project: str
    resource_pool: str | None  # None or "": the workspace's default
    mount: str  # the shared folder, which containers see under the same path
    image: str
    venv: str


def load(folder: Path = FOLDER) -> Site:
    """The site's values.

    Raises:
        Refused: no such file, or one that is not such a YAML; names the key.
    """
    path = folder / VALUES
    site = read_yaml(Site, path, "the site's values")
    for key, value in asdict(site).items():
        if not (value or key == "resource_pool") or not (value or " ").isprintable():
            raise Refused(f"{path}: {key} must be one line of text, not {value!r}")
        if key in ("mount", "venv") and not value.startswith("/"):
            raise Refused(f"{path}: {key} must be an absolute path, not {value}")
    return site


def agreed(folder: Path = FOLDER) -> Site:
    """The site's values, which every configuration has as well.

    Raises:
        Refused: as :func:`load`, and a configuration that has other ones.
    """
    site = load(folder)
    for path, text, wanted in _configurations(folder, site):
        if wanted != text:
            raise Refused(_stale(path))
    return site


def apply(folder: Path, check: bool) -> None:
    """Rewrite, or only compare, all configurations in ``folder``."""
    for path, text, wanted in list(_configurations(folder, load(folder))):
        if wanted != text and check:
            raise CheckFailed(_stale(path))
        if wanted != text:
            write_bytes(path, wanted.encode())
            print(f"{path.name}: rewritten")


def _stale(path: Path) -> str:
    return f"{path.name} does not have the values of {VALUES}; run python -m tools.site"


def _configurations(folder: Path, site: Site) -> Iterator[tuple[Path, str, str]]:
    """Path, text, and the text with the site's values, of every configuration."""
    for path in sorted(folder.glob("*.yaml")):
        if path.name != VALUES:
            try:
                text = content(path, "a configuration").decode()
            except UnicodeDecodeError as error:
                raise Refused(f"a configuration is not UTF-8: {path} ({error})") from None
            yield path, text, rewritten(text, asdict(site), path.name)


def rewritten(text: str, values: dict[str, str | None], where: str) -> str:
    """``text`` with the site's values in its marked lines.

    Raises:
        Refused: a mark of a key that the site does not have, or on a line without a place for a value.
    """

    def line(match: re.Match) -> str:
        if match["key"] not in values:
            raise Refused(f"{where} wants the site value {match['key']}, which {VALUES} does not have")
        value = values[match["key"]] or ""
        return _with_value(match["line"], match["key"], value, where) + match["mark"]

    return _MARKED.sub(line, text)


def _with_value(line: str, key: str, value: str, where: str) -> str:
    if line.startswith("#"):
        if found := re.fullmatch(_FLAG.format(key=key), line):
            return f"{found['head']}{shlex.quote(value)}{found['tail']}"
    elif found := _VARIABLE.fullmatch(line):
        return found["head"] + _scalar(f"{found['name']}={value}")
    elif found := _KEY.fullmatch(line):
        return found["head"] + _scalar(value)
    raise Refused(f"{where}: no place for a value in the line that is marked # site: {key}: {line.strip()}")


def _scalar(value: str) -> str:
    """``value`` as YAML writes it in one line, quoted where it must be."""
    return yaml.safe_dump(value, allow_unicode=True, width=sys.maxsize).removesuffix("...\n").strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.site", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    return guarded(lambda: apply(FOLDER, arguments.check))


if __name__ == "__main__":
    sys.exit(main())
