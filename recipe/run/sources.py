"""Code that a number depends on: this repository's, the installed trainer's, and the versions of what takes part."""

import sys
from importlib import metadata, util
from pathlib import Path

from recipe.errors import Refused
from recipe.files import file_digest, files_below

ROOT = Path(__file__).resolve().parents[2]
OWN = ("experiments", "recipe", "tools", "tests")  # the importable folders of the checkout's root
SOURCES = ("recipe", "experiments")  # those whose code can decide a number
# What reads finished evidence, shows it, or makes practice checkpoints: changing it changes no number.
READERS = ("recipe/practice/", "recipe/progress.py", "recipe/report.py", "recipe/verify/", "experiments/report.py")
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "scipy")

# The installed modules that decide what is sampled, scored and optimised.
TRAINER_SOURCES = {
    "trl": (
        "trainer/grpo_trainer.py", "trainer/grpo_config.py", "trainer/base_trainer.py", "trainer/utils.py",
        "chat_template_utils.py", "data_utils.py", "models/utils.py",
    ),
    "transformers": (
        "trainer.py", "trainer_callback.py", "training_args.py", "optimization.py", "tokenization_utils_base.py",
        "cache_utils.py", "generation/utils.py", "generation/logits_process.py", "models/qwen3/modeling_qwen3.py",
    ),
    "peft": ("peft_model.py", "tuners/lora/model.py", "tuners/lora/layer.py"),
    "accelerate": ("accelerator.py",),
}  # fmt: skip


def package_sources() -> dict[str, str]:
    """Digests of the code that decides a number, by path below the repository root."""
    paths = sorted(path for folder in SOURCES for path in files_below(ROOT / folder))
    names = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {name: file_digest(path) for name, path in names.items() if is_source(name)}


def is_source(name: str) -> bool:
    """Whether a file of the checkout, by its path there, is code that decides a number."""
    return name.endswith(".py") and name.partition("/")[0] in SOURCES and not name.startswith(READERS)


def nothing_in_the_way() -> None:
    """Refuse a module in the checkout's root: started from there, Python would take it for an installed one."""
    for path in sorted(ROOT.iterdir()):
        module = path.suffix in (".py", ".pyc", ".so") or (path / "__init__.py").is_file()
        if module and path.name not in OWN:
            raise Refused(f"{path} would come before an installed module of that name; move it away")


def trainer_sources() -> dict[str, str]:
    """Digests of the installed modules in :data:`TRAINER_SOURCES`, found without importing them."""
    found = {}
    for package, names in TRAINER_SOURCES.items():
        spec = util.find_spec(package)
        if spec is None:
            raise Refused(f"{package} is not installed; see the README for the two environments")
        root = Path(spec.origin).parent
        for name in names:
            if (root / name).is_file():
                found[f"{package}/{name}"] = file_digest(root / name)
    return found


def versions() -> dict[str, str]:
    """Version of Python (major.minor) and of every package that takes part."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise Refused(f"{package} is not installed; see the README for the two environments") from None
    return found
