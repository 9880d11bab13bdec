"""Chains the stages of a run, as experiments on the cluster or as processes on this machine.

    python -m tools.driver run --model /abs/sft/checkpoint --retention-baseline /abs/sft/run --output runs/my-pilot
    python -m tools.driver run --plan runs/my-pilot/plan.json [--local] [--resume]
    python -m tools.driver status --run runs/my-pilot
    python -m tools.driver fetch  --run runs/my-pilot --to ./artifacts
    python -m tools.driver verify --run runs/my-pilot [--key PUBLIC.pem]
    python -m tools.driver sign   --run runs/my-pilot --key KEY.pem
    python -m tools.driver sweep  --model … --retention-baseline … --space determined_configs/sweep.yaml --output runs/my-sweep

On the cluster (DET_MASTER and Determined's own login) the same command goes on where an earlier one stood, also after
it was killed: it finds the running experiment again and submits none twice. A stage that failed stops the chain;
--resume sets its evidence aside and repeats it. A run of all stages ends with a manifest, which verify proves again and
sign signs, with a key that openssl makes (sign --help).
"""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import yaml

from recipe import config, report
from recipe.errors import Refused
from recipe.files import check_entry, files_below, real
from recipe.run import attempts
from recipe.run.alone import alone
from recipe.run.entrypoint import guarded
from recipe.run.plan import PLAN, TASKS, Plan, load, load_run, prepare
from recipe.run.result import completed, shown
from recipe.run.result import load as load_result
from recipe.stages import NAMES, STAGES
from recipe.verify import rerun
from tools import site
from tools.driver import chain, compare, local, manifest, place, remote, signature, sweep_commands
from tools.driver.records import STATE, load_state
from tools.driver.screen import Screen


def run(given: argparse.Namespace) -> int:
    """All stages in order."""
    if given.dry_run:
        return _dry_run(given)
    screen = Screen()
    if given.local:
        plan = _loaded(_plan_file(given, screen))
        with alone(plan.run, "driver"):
            return local.run(plan, NAMES, given.resume)
    master = _place(given, screen)  # before anything is frozen
    plan = _loaded(_plan_file(given, screen))
    with alone(plan.run, "driver"):
        chain.Chain(plan, NAMES, master, given.resume, given.register, screen.say, screen.progress).run()
        screen.say(f"manifest: {manifest.write(plan, NAMES)}")
    screen.say("\n".join(report.told(plan)))
    return 0


def _place(given: argparse.Namespace, screen: Screen) -> remote.Master:
    """The master that the run's stages will start on."""
    if not given.plan:
        paths = {"--output": given.output, "--model": given.model, "--retention-baseline": given.retention_baseline}
        return place.master(paths, screen.say)
    plan = load(given.plan, check_inputs=False)
    paths = {"the run": plan.run, "its checkpoint": plan.checkpoint, "its retention baseline": plan.retention_baseline}
    return place.master(paths, screen.say, " and prepare a new plan")


def _loaded(plan_file: Path) -> Plan:
    """The plan, once it is sure that logs and metrics can be written: through a link they would land elsewhere."""
    plan = load(plan_file)
    for name in manifest.REPORTED:
        files_below(plan.run / name)
    return plan


def _plan_file(given: argparse.Namespace, screen: Screen) -> Path:
    return real(given.plan) if given.plan else _prepared(given, screen)


def _prepared(given: argparse.Namespace, screen: Screen) -> Path:
    """The plan file in ``--output``, frozen now unless it is there already for the same inputs."""
    plan_file = real(given.output) / "plan.json"
    wanted = config.resolve(config.read(given.config))
    if not plan_file.exists():
        frozen = prepare(given.model, given.retention_baseline, wanted, given.output)
        screen.say("\n".join(frozen.announcement()))
        return plan_file
    frozen = load(plan_file, check_inputs=False).frozen
    for option, found, now in (
        ("--model", frozen.checkpoint.path, str(real(given.model))),
        ("--retention-baseline", frozen.retention_baseline.path, str(real(given.retention_baseline))),
        ("--config", frozen.config, asdict(wanted)),
    ):
        if found != now:
            raise Refused(f"{plan_file} was frozen with another {option}; go on with --plan, or choose a new --output")
    return plan_file


def _dry_run(given: argparse.Namespace) -> int:
    """Print every configuration as it would be submitted. Asks no master and writes nothing."""
    site.agreed()
    plan_file = real(given.plan) if given.plan else real(given.output) / "plan.json"
    plan = load(plan_file) if given.plan or plan_file.exists() else None
    identity, nonce, kind = (plan.id, plan.frozen.nonce, plan.kind) if plan else ("not-yet-frozen", "new", "new")
    for name in NAMES:
        label, store = chain.label_of(identity, nonce, name, 1), given.register is not None
        wanted = chain.configuration(name, identity, kind, plan_file, label, store)
        print(f"---\n{yaml.safe_dump(wanted, sort_keys=False)}", end="")
    return 0


def status(folder: Path) -> None:
    """Print a table of the stages, with the cluster's word where it can be asked."""
    plan = load_run(folder, check_inputs=False)
    print(f"{plan.kind} plan {plan.id[:16]} in {plan.run}")
    for row in (("stage", "experiment", "state", "time", "key metric"), *_rows(plan)):
        print("  {:<10} {:>10}  {:<12} {:>8}  {}".format(*row).rstrip())
    if (plan.run / manifest.NAME).exists():
        print(f"manifest: {plan.run / manifest.NAME}")


def _rows(plan: Plan) -> Iterator[tuple[str, str, str, str, str]]:
    state, master, refusal = load_state(plan.run), None, None
    for name, facts in STAGES.items():
        attempts = state.attempts.get(name) if state else None
        attempt = attempts[-1] if attempts else None
        disk = chain.on_disk(plan.run, name)
        word = "not started" if disk == "nothing" else disk
        if attempt and attempt.failure:
            word = "failed"
        elif attempt and attempt.experiment and attempt.ended is None:
            if master is None and refusal is None:
                try:
                    master = remote.connect(state.cluster.address)
                except Refused as error:
                    refusal = error
                    print(f"as last seen: {refusal}", file=sys.stderr)
            word = master.look(attempt.experiment).state.lower() if master else "submitted"
        number = str(attempt.experiment or "") if attempt else ""
        if disk in ("complete", "failed"):
            result = load_result(plan.run / name)
            value = shown(result.metrics.get(facts.headline, ""))
            yield name, number, word, f"{result.seconds['total']:.0f} s", f"{facts.headline} {value}".strip()
        else:
            yield name, number, word, "", ""


def fetch(folder: Path, target: Path) -> None:
    """Copy what the run came to into a new folder, checked; ``verify`` works there as well.

    Left behind are unfinished attempts (the journal has the digests of those that were set aside) and what a paused training would go on from.

    Raises:
        Refused: a link, a pipe or their like among what would be copied, a changed output, or a ``target`` that exists;
            nothing is left of the copy.
    """
    plan = load_run(folder, check_inputs=False)
    if os.path.lexists(target):
        raise Refused(f"{target} exists already; choose a new folder")
    names = (PLAN, TASKS, attempts.NAME, STATE, manifest.NAME, signature.NAME)
    sources = [plan.run / name for name in names]
    sources = [path for path in sources if path.exists()]
    finished = [name for name in NAMES if chain.on_disk(plan.run, name) == "complete"]
    for name in (*manifest.REPORTED, *finished):
        sources += files_below(plan.run / name)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for source in sources:
            copy = partial / source.relative_to(plan.run)
            copy.parent.mkdir(parents=True, exist_ok=True)
            check_entry(source)
            shutil.copyfile(source, copy, follow_symlinks=False)
        copied, count = load_run(partial, check_inputs=False), len(files_below(partial))
        for name in finished:
            completed(copied, name)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    print(f"{target}: {count} files")


def verify(
    folder: Path, replayed: bool, key: Path | None = None, sampled: bool = False, again: str | None = None
) -> None:
    """Prove the manifest again; what this machine cannot check is said.

    Args:
        key: it must have been signed with this key's other half.
        sampled: have the checkpoints draw the recorded tokens once more.
        again: an interval to train once more.
    """
    signer = key and signature.check(folder, key)
    if sampled or again is not None:
        plan = load_run(folder)  # with every input, and by the run's own sources
        ends = None if again is None else rerun.interval(plan, again)
    lines = list(manifest.verify(folder, NAMES, remote.connect, replayed))
    print(*lines, sep="\n", end="\n" if lines else "")
    if sampled:
        for name, drawn in report.proved(plan).items():
            counts = f"{drawn.matched} matched, {drawn.undecided} undecided, {drawn.contradicted} contradicted"
            print(f"sampling: {name}: {counts} of {drawn.tokens} tokens")
    if again is not None:
        print(rerun.rerun(plan, *ends))
    whole = not any(line.startswith(compare.UNCHECKED) for line in lines)
    print(f"{folder / manifest.NAME} holds" + ("" if whole else ", as far as it was checked"))
    print(f"signed by key {signer}, whose holder vouches for what nothing derives" if signer else signature.UNSIGNED)


def sign(folder: Path, key: Path) -> None:
    """Sign the manifest with a private ``key``, once all of it was proved again.

    Raises:
        Refused, CheckFailed: as :func:`verify` and :func:`signature.made`, or the manifest changed meanwhile; nothing
            is written.
    """
    envelope = signature.made(folder, key)  # what cannot be signed is refused before minutes of proving
    verify(folder, replayed=True)
    if signature.made(folder, key) != envelope:
        raise Refused(f"{folder / manifest.NAME} changed while it was proved; sign it again")
    print(f"now signed: {signature.write(folder, envelope)}")


KEYS = f"""make a key once, keep it to yourself, and give its public half to those who verify:
  (umask 077; {signature.MAKE})
  {signature.PUBLISH}
signing needs a library: pip install '{signature.EXTRA}'"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.driver", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("run", help="run all stages in order, or go on with them")
    start.add_argument("--plan", type=Path, help="plan.json of a prepared run; or the next three:")
    start.add_argument("--model", type=Path, help="checkpoint folder to start from")
    start.add_argument("--retention-baseline", "--retention-run", type=Path, help="its retention baseline")
    start.add_argument("--output", type=Path, help="run folder; its plan is frozen first, if it has none")
    start.add_argument("--config", type=Path, help="YAML with overrides of the configuration")
    start.add_argument("--local", action="store_true", help="on this machine, one process a stage")
    start.add_argument("--resume", action="store_true", help="repeat what failed; with --local: go on")
    start.add_argument("--register", metavar="NAME", help="put the merged checkpoint into the model registry")
    start.add_argument("--dry-run", action="store_true", help="print the configurations, submit nothing")
    for name, text in (
        ("status", "a table of the stages"),
        ("fetch", "copy the run's artifacts"),
        ("verify", "prove the manifest again, on disk and on the cluster"),
        ("sign", "prove the manifest again and sign it"),
    ):
        command = commands.add_parser(name, help=text)
        which = command.add_mutually_exclusive_group(required=True)
        which.add_argument("--run", type=Path, help="run folder")
        which.add_argument(
            "--plan", dest="run", metavar="PLAN", type=lambda path: real(path).parent, help="its plan.json"
        )
        if name == "fetch":
            command.add_argument("--to", type=Path, required=True, help="new folder")
        if name == "verify":
            command.add_argument("--quick", action="store_true", help="take rollouts and weights at their word")
            command.add_argument("--sampling", action="store_true", help="have the checkpoints draw every token again")
            command.add_argument(
                "--rerun", metavar="FROM:TO", nargs="?", const=":", help="train the steps between two kept checkpoints again"
            )
            signed = "it must be signed with this key's other half"
            command.add_argument("--key", type=Path, metavar="PUBLIC.pem", help=signed)
        if name == "sign":
            command.add_argument("--key", type=Path, metavar="KEY.pem", required=True, help="private Ed25519 key")
            command.formatter_class = argparse.RawDescriptionHelpFormatter
            command.epilog = KEYS
    search = sweep_commands.add(commands)
    given = parser.parse_args()
    if given.command == "sweep":
        return sweep_commands.run(search, given)
    if given.command == "run":
        new = (given.model, given.retention_baseline, given.output)
        if bool(given.plan) == all(new) or (given.plan and any((*new, given.config))):
            start.error("give either --plan, or --model, --retention-baseline and --output")
        if given.local and (given.register or given.dry_run):
            start.error("--register and --dry-run are for the cluster")
        try:
            return guarded(lambda: run(given))
        except KeyboardInterrupt:
            follows = "an experiment goes on by itself, and the same command follows it again"
            print(f"stopped; {'go on with --resume' if given.local else follows}", file=sys.stderr)
            return 128 + signal.SIGINT
    work = {
        "status": lambda: status(given.run),
        "fetch": lambda: fetch(given.run, given.to),
        "verify": lambda: verify(given.run, not given.quick, given.key, given.sampling, given.rerun),
        "sign": lambda: sign(given.run, given.key),
    }
    return guarded(work[given.command])

