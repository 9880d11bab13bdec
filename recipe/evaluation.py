"""Agent evaluation: a policy's rollouts on held-out tasks under the frozen protocol.

Baseline and candidate are measured by the same function on the same tasks with the same random streams, so that
the comparison is paired by item.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from recipe import determinism
from recipe.config import Evaluation, Rules
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


def evaluate_checkpoint(stage: Stage, path: Path) -> Done:
    """Evaluate the checkpoint at ``path`` on the test split; the whole of the baseline stage."""
    plan = stage.plan
    determinism.settle(plan.config.deterministic)
    model = checkpoint.load_model(path, plan.config.evaluation.precision, checkpoint.device())
    chat = agent_chat(checkpoint.load_tokenizer(path), plan.config.rules.family)
    start = time.perf_counter()
    settings = plan.config.evaluation
    with stage.progress(len(plan.splits["test"]) * settings.samples_per_task, "rollout") as progress:
        records = evaluate(model, chat, plan.splits["test"], plan.config.rules, settings, progress.update)
    stage.seconds["generation"] = time.perf_counter() - start
    write_lines(stage.folder / evidence.ROLLOUTS, map(asdict, records))
    return Done(evidence.aggregate(records))


def evaluate_merged(stage: Stage) -> Done:
    """Evaluate the merge stage's checkpoint; the whole of the candidate stage."""
    return evaluate_checkpoint(stage, stage.plan.run / "merge" / "checkpoint")


def evaluate(
    model,
    chat: Chat,
    tasks: Sequence[Task],
    rules: Rules,
    evaluation: Evaluation,
    finished: Callable[[], object] = lambda: None,
) -> list[Evaluated]:
    """Records of ``samples_per_task`` rollouts a task, in task order; ``finished`` is called as each ends.

    ``model`` is evaluated as it is: put it into ``eval()`` first.
    """
    wanted = [(task, number) for task in tasks for number in range(evaluation.samples_per_task)]
    agent, rows = rules.agent, min(evaluation.batch_size, len(wanted))
    decoder = make_decoder(agent.decoder, model, chat, agent.sampling, rows=rows, context=rollout_context(chat, agent, tasks))
    rollouts = decoder.serve(
        (
            dialogue(Rollout(task, chat, rules), RandomStream(agent.seed, task.task_id, number))
            for task, number in wanted
        ),
        finished,
    )
    return [rollout.record(Evaluated, sample=number) for rollout, (_, number) in zip(rollouts, wanted, strict=True)]
