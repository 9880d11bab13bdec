"""Agent evaluation: a policy's rollouts on held-out tasks under the frozen protocol.

Baseline and candidate are measured by the same function on the same tasks with the same random streams, so that
the comparison is paired by item.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from recipe import checkpoint, evidence, parallel
from recipe.chat import Chat
from recipe.config import Agent, Evaluation
from recipe.decoding import RandomStream
from recipe.files import write_lines
from recipe.policy import agent_chat, turn_sampler
from recipe.rollout import Request, sample
from recipe.stage import Done, Stage
from recipe.tasks import Task


def evaluate_checkpoint(stage: Stage, path: Path) -> Done:
    """Evaluate the checkpoint at ``path`` on the test split; the whole of the baseline stage."""
    plan = stage.plan
    identity = checkpoint.identity(path)
    model = checkpoint.load_model(path, plan.config.evaluation.precision, checkpoint.device())
    chat = agent_chat(checkpoint.load_tokenizer(path))
    start = time.perf_counter()
    records = evaluate(model, chat, plan.splits["test"], plan.config.agent, plan.config.evaluation, stage.name)
    stage.times["generation"] = time.perf_counter() - start
    write_lines(stage.folder / evidence.ROLLOUTS, records)
    return Done(evidence.aggregate(records), ancestry={"checkpoint": identity["digest"]})


def evaluate_merged(stage: Stage) -> Done:
    """Evaluate the merge stage's checkpoint; the whole of the candidate stage."""
    stage.completed("merge")
    return evaluate_checkpoint(stage, stage.plan.run / "merge" / "checkpoint")


def evaluate(
    model, chat: Chat, tasks: Sequence[Task], agent: Agent, evaluation: Evaluation, title: str
) -> list[dict]:
    """Records of ``samples_per_task`` rollouts a task, in task order, with a progress bar in rollouts.

    ``model`` is evaluated as it is: put it into ``eval()`` first.
    """
    from tqdm import tqdm

    requests = [Request(task, number) for task in tasks for number in range(evaluation.samples_per_task)]
    draw = turn_sampler(model, chat, agent, tasks, min(evaluation.batch_size, len(requests)))
    records = []
    with tqdm(total=len(requests), desc=title, unit="rollout", disable=not parallel.chief()) as bar:
        for start in range(0, len(requests), evaluation.batch_size):
            batch = requests[start : start + evaluation.batch_size]
            streams = [RandomStream(agent.seed, request.task.task_id, request.sample) for request in batch]
            for request, rollout in zip(batch, sample(batch, chat, agent, draw, streams)):
                records.append({**rollout.record(), "sample": request.sample})
            bar.update(len(batch))
    return records
