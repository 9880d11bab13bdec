"""The site's values: of any text, in every configuration, and nothing else changed."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from recipe.errors import CheckFailed, Refused
from runs import ROOT
from tools import site

CONFIGS = ROOT / "determined_configs"
SITE = yaml.safe_load((CONFIGS / "site.yaml").read_text())


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CONFIGS, tmp_path / "determined_configs"))


def test_the_configurations_have_the_values_of_the_site():
    done = subprocess.run([sys.executable, "-m", "tools.site", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def other_site(folder: Path, **values) -> dict:
    other = {key: f"/elsewhere/{key}" for key in SITE} | values
    (folder / "site.yaml").write_text(yaml.safe_dump(other, allow_unicode=True), encoding="utf-8")
    return other


def test_another_site_changes_its_values_everywhere_and_nothing_else(tmp_path):
    folder = copied(tmp_path)
    other_site(folder)
    with pytest.raises(CheckFailed, match="baseline.yaml does not have the values of site.yaml"):
        site.apply(folder, check=True)
    with pytest.raises(Refused, match="baseline.yaml does not have the values of site.yaml"):
        site.agreed(folder)
    site.apply(folder, check=False)
    site.apply(folder, check=True)
    site.agreed(folder)
    for path in folder.glob("*.yaml"):
        if path.name == "site.yaml":
            continue
        before, after = (CONFIGS / path.name).read_text(), path.read_text()
        assert not [value for value in SITE.values() if value in after], path.name
        for old, new in zip(before.splitlines(), after.splitlines(), strict=True):
            assert old == new or "# site: " in old


@pytest.mark.parametrize(
    "value",
    ["My Team", "a: b", "it's", 'say "x"', "a # b", "x  # site: mount", "~", "yes", "42", "1e3", "{a}", "*a", "- x", "", "Köln…"],
)
def test_any_text_is_written_and_written_over_again(tmp_path, value):
    folder = copied(tmp_path)
    for _ in range(2):
        wanted = other_site(folder, resource_pool=value, workspace=value or "w", mount=f"/{value}")
        site.apply(folder, check=False)
        site.apply(folder, check=True)
        grpo = yaml.safe_load((folder / "grpo.yaml").read_bytes())
        assert (grpo["resources"]["resource_pool"], grpo["workspace"]) == (value, wanted["workspace"])
        assert grpo["bind_mounts"] == [{"host_path": f"/{value}", "container_path": f"/{value}"}]
        assert grpo["environment"]["environment_variables"][0] == f"SHARED_FOLDER=/{value}"
        head = next(line for line in (folder / "shell.yaml").read_text(encoding="utf-8").splitlines() if "--workspace" in line)
        words = shlex.split(head.rpartition("  # site: ")[0])
        assert words[words.index("--workspace") + 1] == wanted["workspace"]
    (folder / "site.yaml").write_bytes((CONFIGS / "site.yaml").read_bytes())
    site.apply(folder, check=False)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in CONFIGS.iterdir()
    }


def test_no_pool_at_all_is_the_default_one(tmp_path):
    folder = copied(tmp_path)
    other_site(folder, resource_pool=None)
    site.apply(folder, check=False)
    assert yaml.safe_load((folder / "grpo.yaml").read_text())["resources"]["resource_pool"] == ""


def test_another_locale_leaves_the_bytes_alone(tmp_path):
    folder = copied(tmp_path)
    other_site(folder, workspace="Köln")
    code = "import sys; from pathlib import Path; from tools import site; site.apply(Path(sys.argv[1]), False)"
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, env=environment, check=True)
    text = (folder / "retention_baseline.yaml").read_bytes().decode()
    assert "/pfss/…/checkpoint" in text and yaml.safe_load(text)["workspace"] == "Köln"


def test_a_mark_at_the_end_of_a_line_with_more_space_is_still_one(tmp_path):
    folder = copied(tmp_path)
    windows = (folder / "grpo.yaml").read_bytes().replace(b"\n", b" \r\n")
    (folder / "grpo.yaml").write_bytes(windows)
    other_site(folder)
    site.apply(folder, check=False)
    assert yaml.safe_load((folder / "grpo.yaml").read_bytes())["workspace"] == "/elsewhere/workspace"


BROKEN = {
    "not YAML": ("workspace: [", "site's values is not YAML|site's values are not YAML"),
    "a list": ("- a", "site.yaml must be a mapping"),
    "a missing key": ("workspace: a", "site.yaml: key image is missing"),
    "an unknown key": ("pool: a", "site.yaml: key .* is (missing|unknown)"),
    "a number": ("workspace: 42", "site.yaml: workspace must be str, not 42"),
    "an empty value": ('workspace: ""', "workspace must be one line of text"),
    "two lines": ('workspace: "a\\nb"', "workspace must be one line of text"),
    "a relative mount": ("mount: pfss", "mount must be an absolute path"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_values_are_one_line_each(tmp_path, case):
    given, line = BROKEN[case]
    folder = copied(tmp_path)
    key = given.partition(":")[0]
    whole = [f"{name}: /x" for name in SITE if name != key] if case not in ("not YAML", "a list", "a missing key") else []
    (folder / "site.yaml").write_text("\n".join([given, *whole]))
    with pytest.raises(Refused, match=line):
        site.apply(folder, check=True)


def test_a_mark_without_a_value_or_of_no_key_is_refused(tmp_path):
    folder = copied(tmp_path)
    text = (folder / "grpo.yaml").read_text()
    for wrong, line in (("bind_mounts:", "no place for a value"), ("x: 1", "wants the site value")):
        key = "mount" if wrong == "bind_mounts:" else "elsewhere"
        (folder / "grpo.yaml").write_text(f"{text}\n{wrong}  # site: {key}\n")
        with pytest.raises(Refused, match=f"grpo.yaml.* {line}|grpo.yaml: {line}"):
            site.apply(folder, check=True)
