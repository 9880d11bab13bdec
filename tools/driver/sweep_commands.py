"""The driver's ``sweep``: a search over learning rates and seeds that the cluster's searcher conducts.

    python -m tools.driver sweep --model /abs/sft/checkpoint --retention-baseline /abs/sft/run \\
        --space determined_configs/sweep.yaml --output runs/my-sweep
    python -m tools.driver sweep status  --sweep runs/my-sweep
    python -m tools.driver sweep promote --sweep runs/my-sweep --output runs/my-pilot

The space is a YAML with hyperparameters and searcher in Determined's form. Each trial trains with settings of its own
and is measured on the development split; the test split is not even drawn. promote freezes a full run with the
settings that the rule, frozen beforehand, has chosen; `run --plan` then runs it. With --local the points of a grid run
here, one after another. The same command goes on after the driver was killed.
"""

import argparse
import signal
import sys
from pathlib import Path

import yaml

from recipe import config
from recipe.config import resolve
from recipe.errors import Refused
from recipe.files import canonical, real
from recipe.records import read_yaml
from recipe.run import plan as plans
from recipe.run.alone import alone
from recipe.run.entrypoint import guarded
from recipe.sweep import choice, frozen, space, table
from recipe.sweep.frozen import Sweep
from recipe.sweep.records import Chosen
from tools import site
from tools.driver import place, remote, sweep
from tools.driver.screen import Screen


def add(commands) -> argparse.ArgumentParser:
    """Add the command to a parser's subcommands."""
    search = commands.add_parser(
        "sweep",
        help="search over settings of training, and choose on the development split",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    search.add_argument("--model", type=Path, help="checkpoint folder to start from")
    search.add_argument("--retention-baseline", "--retention-run", type=Path, help="its retention baseline")
    search.add_argument("--space", type=Path, help="YAML with hyperparameters and searcher")
    search.add_argument("--output", type=Path, help="the sweep's folder; it is frozen first, if there is none")
    search.add_argument("--config", type=Path, help="YAML with overrides that all trials share")
    search.add_argument("--local", action="store_true", help="a grid on this machine, one process a trial")
    search.add_argument("--resume", action="store_true", help="submit another experiment for one that failed")
    search.add_argument(
        "--dry-run", action="store_true", help="print the configuration for both versions, submit nothing"
    )
    more = search.add_subparsers(dest="action", metavar="{status,promote}")
    shown = more.add_parser("status", help="a table of the trials")
    promoted = more.add_parser("promote", help="freeze the full run's plan from the winner")
    for command in (shown, promoted):
        command.add_argument("--sweep", type=Path, required=True, help="the sweep's folder")
    promoted.add_argument("--to", "--output", dest="target", type=Path, required=True, help="new run folder")
    return search


def run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Exit code of the command."""
    if given.action == "status":
        return guarded(lambda: print(*sweep.status(frozen.load(given.sweep), remote.connect), sep="\n"))
    if given.action == "promote":
        return guarded(lambda: promote(given.sweep, given.target))
    if not all((given.model, given.retention_baseline, given.space, given.output)):
        parser.error("give --model, --retention-baseline, --space and --output; or status, or promote")
    if given.local and (given.resume or given.dry_run):
        parser.error("--resume and --dry-run are for the cluster; here the same command goes on")
    try:
        return guarded(lambda: search(given))
    except KeyboardInterrupt:
        print(
            f"stopped; {'' if given.local else 'the experiment goes on by itself, and '}the same command goes on",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT


def search(given: argparse.Namespace) -> int:
    """Freeze, conduct, choose."""
    screen, document = Screen(), read_yaml(dict, given.space, "the space")
    if given.dry_run:
        return _dry_run(given, document)
    if given.local:
        found = _frozen(given, document, screen)
        with alone(found.folder, "driver"):
            return sweep.local(found, screen.say)
    paths = {"--output": given.output, "--model": given.model, "--retention-baseline": given.retention_baseline}
    space.of(document, config.read(given.config) or {}, str(given.space))  # before a master is asked
    master = place.master(paths, screen.say)
    found = _frozen(given, document, screen)
    with alone(found.folder, "driver"):
        sweep.Conducted(found, _rest(document), master, given.resume, screen.say, screen.progress).run()
    return 0


def _frozen(given: argparse.Namespace, document: dict, screen: Screen) -> Sweep:
    """The sweep in ``--output``, frozen now unless it is there already for the same inputs."""
    overrides, where = config.read(given.config) or {}, str(given.space)
    if not (real(given.output) / frozen.NAME).exists():
        made = frozen.freeze(given.model, given.retention_baseline, overrides, document, where, given.output)
        screen.say(f"{sweep.kind(made)} {made.id[:16]} frozen in {made.folder / frozen.NAME}")
        screen.say(f"rule: {choice.RULE}")
        return made
    found = frozen.load(given.output)
    base = found.frozen.base
    for option, there, now in (
        ("--model", base.checkpoint.path, str(real(given.model))),
        ("--retention-baseline", base.retention_baseline.path, str(real(given.retention_baseline))),
        ("--config", found.frozen.config, overrides),
        ("--space", vars(found.space), vars(space.of(document, overrides, where))),
    ):
        if canonical(there) != canonical(now):
            raise Refused(f"{found.folder / frozen.NAME} was frozen with another {option}; choose a new --output")
    return found


def _rest(document: dict) -> dict:
    """What a space's YAML says of the experiment besides."""
    return {key: value for key, value in document.items() if key not in ("hyperparameters", "searcher")}


def _dry_run(given: argparse.Namespace, document: dict) -> int:
    """Print the configuration as either version of the master would get it. Asks no master and writes nothing."""
    site.agreed()
    overrides = config.read(given.config) or {}
    tried = space.of(document, overrides, str(given.space))
    if tried.searcher["name"] == "grid":
        print(f"# {len(tried.grid())} trials")
    for version in ("0.35.0", "0.38.1"):
        wanted = sweep.configuration(
            real(given.output), tried, overrides, _rest(document), version, "sweep:not-yet-frozen", "not frozen yet"
        )
        print(f"--- # for a {version} master\n{yaml.safe_dump(wanted, sort_keys=False)}", end="")
    return 0


def promote(folder: Path, output: Path) -> None:
    """Freeze the plan of the full run with the settings that were chosen.

    Its seed is the shared configuration's, not the luckiest trial's.

    Raises:
        Refused: the sweep has not ended, its record does not follow from its trials, nothing could be chosen, or an
            input that has changed since.
    """
    found = frozen.load(folder)
    there, record = table.load(found)
    if not there.over:
        raise Refused(f"{found.folder}: trials are to go on; promote when all have ended")
    winner = there.choice.chosen
    if winner is None:
        raise Refused(f"{found.folder}: {sweep.verdict(there)[0]}")
    base = found.frozen.base
    settings = resolve(space.merged(found.frozen.config, found.space.overrides(winner)))
    chosen = Chosen(found.id, record, len(there.trials), there.split, found.frozen.rule, winner)
    plans.check_tree("checkpoint file", base.checkpoint, linked=True)
    plans.check_tree("retention evidence", base.retention_baseline, linked=False)
    inputs = (Path(tree.path) for tree in (base.checkpoint, base.retention_baseline))
    plan = plans.prepare(*inputs, settings, output, chosen=chosen)
    for line in sweep.verdict(there):
        print(line)
    print("\n".join(plan.announcement()))
    if plan.frozen.sources != base.sources:
        print("the sources differ from those of the sweep; the plan has its own")
