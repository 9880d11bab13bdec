"""The commit that the sources came from, and proof that a commit holds given sources."""

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

from recipe.errors import Refused


def state(root: Path, sources: dict[str, str], is_source: Callable[[str], bool], required: bool) -> dict:
    """``{path, commit, uncommitted}`` of the checkout; ``uncommitted`` lists sources unlike the commit's, deleted ones too.

    ``commit`` is None where there is none to be had; then every source counts as uncommitted.

    Raises:
        Refused: there is none, though ``required``; says why.
    """
    try:
        name = _commit(root, "HEAD")
    except Refused as refusal:
        if required:
            raise Refused(f"no commit of {root}, and the plan records one ({refusal}); prepare from a git checkout") from None
        return {"path": str(root), "commit": None, "uncommitted": sorted(sources)}
    listed = _git(root, "ls-tree", "-r", "-z", "--name-only", name).stdout.decode().split("\0")
    deleted = {path for path in listed if is_source(path)} - sources.keys()
    return {"path": str(root), "commit": name, "uncommitted": sorted({*differing(root, name, sources), *deleted})}


def differing(root: Path, commit: str, sources: dict[str, str]) -> list[str]:
    """Sources whose bytes in ``commit`` do not have the given SHA-256.

    Raises:
        Refused: no git, no such commit here, or whatever else keeps git from looking.
    """
    name = _commit(root, commit)
    return [path for path, sha in sorted(sources.items()) if _committed_digest(root, name, path) != sha]


def _commit(root: Path, name: str) -> str:
    done = _git(root, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")
    if done.returncode:
        said = (done.stderr.decode(errors="replace").strip().splitlines() or ["nothing"])[0]
        raise Refused(f"git said no to commit {name[:12]} of {root}: {said}")
    return done.stdout.decode().strip()


def _committed_digest(root: Path, commit: str, path: str) -> str | None:
    done = _git(root, "show", f"{commit}:./{path}")
    return None if done.returncode else hashlib.sha256(done.stdout).hexdigest()


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    """A git command in the checkout that ``root`` is, or lies in.

    The checkout on a shared file system often belongs to another user than the task's; reading it is safe. Git before
    2.38 takes no ``safe.directory`` on its command line, but every git takes a folder that is named.
    """
    top = next((place for place in (root, *root.parents) if (place / ".git").exists()), None)
    if top is None:
        raise Refused(f"{root} is in no git checkout")
    command = ["git", f"--git-dir={top / '.git'}", f"--work-tree={top}", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        raise Refused("git is not installed") from None
