"""The commit that the sources came from, and proof that a commit holds given sources."""

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path


def state(root: Path, sources: dict[str, str], is_source: Callable[[str], bool]) -> dict:
    """``{path, commit, uncommitted}`` of the checkout; ``uncommitted`` lists sources unlike the commit's, deleted ones too.

    ``commit`` is None outside a git checkout; then every source counts as uncommitted.
    """
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return {"path": str(root), "commit": None, "uncommitted": sorted(sources)}
    name = commit.decode().strip()
    committed = (_git(root, "ls-tree", "-r", "-z", "--name-only", name) or b"").decode().split("\0")
    deleted = {path for path in committed if is_source(path)} - sources.keys()
    return {"path": str(root), "commit": name, "uncommitted": sorted({*differing(root, name, sources), *deleted})}


def differing(root: Path, commit: str, sources: dict[str, str]) -> list[str]:
    """Sources whose bytes in ``commit`` do not have the given SHA-256."""
    return [path for path, sha in sorted(sources.items()) if _committed_digest(root, commit, path) != sha]


def _committed_digest(root: Path, commit: str, path: str) -> str | None:
    content = _git(root, "show", f"{commit}:./{path}")
    return None if content is None else hashlib.sha256(content).hexdigest()


def _git(root: Path, *arguments: str) -> bytes | None:
    """Output of a git command, None where git says no or is not installed.

    The checkout on a shared file system often belongs to another user than the task's; reading it is safe.
    """
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
