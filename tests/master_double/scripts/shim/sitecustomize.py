"""Moves the harness's fixed container paths, where a mount namespace is not to be had.

Python imports this module at startup because its directory is on PYTHONPATH. The three modules
that spell the paths out are compiled from a text in which the paths are replaced; doing it in the
source also reaches the default arguments.
"""

import importlib.machinery
import os
import sys
from typing import Any

_MODULES = {"determined._info", "determined.constants", "determined.common.constants"}
_PATHS = {
    "/run/determined": os.environ.get("MASTER_DOUBLE_ROOT", ""),
    "/determined_shared_fs": os.environ.get("MASTER_DOUBLE_STORAGE", ""),
}


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        source = self.get_source(fullname) or ""
        for path, replacement in _PATHS.items():
            if replacement:
                source = source.replace(path, replacement)
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder:
    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in _MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, _Finder)
