"""Stage as its code sees it: the plan, its folder, and where it runs behind a few plain functions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from recipe.progress import Progress
from recipe.run import attempts, processes
from recipe.run.cluster import Runtime, chart
from recipe.run.plan import Plan


@dataclass
class Stage:
    """One stage at work. It owns ``RUN/STAGE/`` and writes its evidence there as it goes."""

    name: str
    plan: Plan
    runtime: Runtime
    seconds: dict[str, float] = field(default_factory=dict)
    baseline: Callable[[], bytes | None] = lambda: None  # the file of step 0, where a sweep has measured it already

    @property
    def folder(self) -> Path:
        return self.plan.run / self.name

    def report(self, group: str, step: int, metrics: dict) -> None:
        """Show numbers while the stage runs: on a cluster in its web UI."""
        milestones = self.plan.family.milestones
        self.runtime.report(group, step, {chart(name, milestones): value for name, value in metrics.items()})

    def progress(self, total: int, unit: str, **more) -> Progress:
        """How far the stage's work is, for people on a terminal, in a log or at the cluster's web UI."""
        return Progress(self.name, total, unit, share=self.runtime.progress, shown=processes.is_main(), **more)

    def should_pause(self) -> bool:
        """Whether to save and leave at once; asked between steps."""
        return self.runtime.should_pause()

    def began(self, step: int | None = None) -> None:
        """Record that it begins, or goes on, from a step. A resumable stage says so itself, once it knows the step."""
        attempts.begin(self.plan.run, self.name, step, self.runtime.owner)

    def paused(self, step: int) -> None:
        """Record that it has saved what it had at a step, and leaves."""
        attempts.append(self.plan.run, self.name, attempts.PAUSED, self.runtime.owner, step=step)

    def refused(self) -> None:
        """Record that it was refused, if it had begun at all."""
        attempts.refuse(self.plan.run, self.name, self.runtime.owner)

    def store(self, folder: Path, step: int, metadata: dict) -> None:
        """Hand a checkpoint to the cluster's own storage as well, where there is one."""
        self.runtime.store(folder, step, metadata)
