"""Agent evaluation: a policy's rollouts on held-out tasks under the frozen protocol.

Baseline and candidate are measured by the same function on the same tasks with the same random streams, so that
the comparison is paired by item.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from recipe import determinism
from recipe.config import Rules
from recipe.files import write_lines
from recipe.policy import checkpoint, make_decoder
from recipe.policy.chat import Chat
from recipe.policy.decoding import RandomStream
from recipe.rollout import Rollout, agent_chat, dialogue, rollout_context
from recipe.run import evidence
from recipe.run.evidence import Evaluated
from recipe.run.result import Done
from recipe.run.stage import Stage
from recipe.task.family import Task


def evaluate_starting(stage: Stage) -> Done:
    """Evaluate the starting checkpoint on the test split; the whole of the baseline stage."""
    samples = stage.plan.config.evaluation.samples_per_task
    return Done(evidence.baseline_metrics(_test(stage, stage.plan.checkpoint), samples))


def evaluate_merged(stage: Stage) -> Done:
    """Evaluate the merge stage's checkpoint on the test split; the whole of the candidate stage."""
    return Done(evidence.aggregate(_test(stage, stage.plan.run / "merge" / "checkpoint")))


def _test(stage: Stage, path: Path) -> list[Evaluated]:
    """Records of the checkpoint at ``path`` on the test split, written and returned."""
    plan = stage.plan
    determinism.settle(plan.config.deterministic)
    model = checkpoint.load_model(path, plan.config.evaluation.precision, checkpoint.device())
    chat = agent_chat(checkpoint.load_tokenizer(path), plan.config.rules.family)
    start = time.perf_counter()
    settings, tasks = plan.config.evaluation, plan.splits["test"]
    samples, rows = settings.samples_per_task, settings.batch_size
    with stage.progress(len(tasks) * samples, "rollout") as progress:
        records = evaluate(model, chat, tasks, plan.config.rules, samples, rows, progress.update)
    stage.seconds["generation"] = time.perf_counter() - start
    write_lines(stage.folder / evidence.ROLLOUTS, map(asdict, records))
    return records


def evaluate(
    model,
    chat: Chat,
    tasks: Sequence[Task],
    rules: Rules,
    samples: int,
    rows: int,
    finished: Callable[[], object] = lambda: None,
) -> list[Evaluated]:
    """Records of ``samples`` rollouts a task, in task order; at most ``rows`` are under way, ``finished`` is called as each ends.

    ``model`` is evaluated as it is: put it into ``eval()`` first.
    """
    wanted = [(task, number) for task in tasks for number in range(samples)]
    agent, context = rules.agent, rollout_context(chat, rules.agent, tasks)
    decoder = make_decoder(agent.decoder, model, chat, agent.sampling, rows=min(rows, len(wanted)), context=context)
    rollouts = decoder.serve(
        (
            dialogue(Rollout(task, chat, rules), RandomStream(agent.seed, task.task_id, number))
            for task, number in wanted
        ),
        finished,
    )
    return [rollout.record(Evaluated, sample=number) for rollout, (_, number) in zip(rollouts, wanted, strict=True)]
