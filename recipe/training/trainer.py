"""TRL 0.29.0's GRPOTrainer with five things added, and nothing of its algorithm changed.

How it departs from upstream:

* **Tools** are answered by :func:`recipe.task.environment.execute`, so that an unknown tool or a malformed call gets the
  environment's own German error and is counted, and a fault of the environment stops training.
* **Sampling** is bounded by what remains of the completion budget. Upstream lets every turn run to the full length
  and cuts afterwards, which executes calls that the policy was not going to be shown the answers of.
* **The engine**, where the plan chose it, samples in place of ``model.generate``; each rollout then draws from a stream
  of its own, and the log-probabilities it sampled with are compared with the trainer's, as a metric of every step.
* **Groups that teach nothing** are passed over, where the plan says so (``grpo.resample``): the engine samples the
  groups of several tasks at once, and TRL is given the first one whose rewards differ.
* **Every rollout is proved**: beside TRL's stream grows a :class:`~recipe.rollout.Rollout` from the sampled ids
  alone; ids, loss mask, conditioning prefix and environment events must agree, or training stops. With several
  processes (:mod:`recipe.run.processes`) it stops in all of them.

Generation, grouped advantages, reference log-probabilities and the loss are upstream's.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
import trl
from trl import GRPOTrainer

from recipe.config import Rules
from recipe.errors import CheckFailed
from recipe.policy import make_decoder
from recipe.policy.decoding import Dialogue, RandomStream, Request, Sampled
from recipe.rollout import Rollout, rollout_context
from recipe.run import processes
from recipe.task.environment import Environment, begin_turn, events, execute, raise_fault
from recipe.task.family import Task

SAMPLED = "sampled_logps"  # (B, T): the engine's log-probabilities, zero off the policy's own tokens
GAP_QUANTILE = 0.999  # of a step's tokens: the largest of a few hundred, not of several thousand
TRL_VERSION = "0.29.0"  # the overridden methods are private ones; other releases have others


class AgenticGRPOTrainer(GRPOTrainer):
    """``on_rollouts(rollouts, advantages, dropped)`` hears every scored batch of this process, in dataset order, and
    the groups that were tried for it and dropped.

    Args:
        candidates: the tasks that each group may be of, in the order in which they are tried; the dataset has the first
            of each. One each, unless a step is one group.
    """

    def __init__(self, *, rules: Rules, on_rollouts, candidates: Sequence[Sequence[Task]], **arguments):
        if trl.__version__ != TRL_VERSION:
            raise CheckFailed(f"trainer: trl {trl.__version__} is installed, this trainer is written for {TRL_VERSION}")
        super().__init__(reward_funcs=self._shaped_reward, environment_factory=rules.family.environment, **arguments)
        self.rules, self._on_rollouts = rules, on_rollouts
        self._chat = self.processing_class.chat
        names = [tool.__name__ for tool in self.tools]
        if names != [schema["function"]["name"] for schema in self._chat.tools]:
            raise CheckFailed(f"trainer: TRL offers the tools {names}, the chat renders others")
        self._sync_tool_dicts = [_AnyTool(environment) for environment in self.environments]
        self._candidates = {tasks[0].task_id: tasks for tasks in candidates}
        self._drawn: list[list[Sampled]] = []
        self._dropped: list[list[Rollout]] = []
        self.engine = None
        if (agent := rules.agent).decoder == "engine":
            context = rollout_context(self._chat, agent, (task for tasks in candidates for task in tasks))
            policy, rows = self.accelerator.unwrap_model(self.model), len(self.environments) * len(candidates[0])
            self.engine = make_decoder("engine", policy, self._chat, agent.sampling, rows=rows, context=context)

    def _generate_and_score_completions(self, inputs):
        self._tasks = [self.rules.family.task(**row["task"]) for row in inputs]
        if len(self._candidates[self._tasks[0].task_id]) > 1:
            self._tasks = [self._first_mixed(len(inputs))] * len(inputs)
            inputs = [{**given, **dataset_row(task)} for given, task in zip(inputs, self._tasks)]
        output = super()._generate_and_score_completions(inputs)
        self._on_rollouts(self._rollouts, output["advantages"].tolist(), self._dropped)
        if self.engine is not None:  # a column of the batch, which TRL shuffles and splits with the others
            output[SAMPLED] = torch.zeros_like(output["completion_ids"], dtype=torch.float32)
            for row, (rollout, own) in enumerate(zip(self._rollouts, self._logprobs, strict=True)):
                policy = [place for place, mask in enumerate(rollout.mask) if mask]
                output[SAMPLED][row, policy] = torch.tensor(own, device=output[SAMPLED].device)
        return output

    def _first_mixed(self, rows: int) -> Task:
        """The first candidate of this step whose group has unequal rewards, or the first of all.

        The groups of all candidates are sampled at once. What was drawn for the chosen one is kept, for TRL to be given
        turn by turn; the groups that were tried before it, or all others where none is mixed, are dropped.
        """
        candidates = self._candidates[self._tasks[0].task_id]
        groups: list[list[tuple[Rollout, list[Sampled]]]] = []

        def sample() -> list[list[float]]:
            spoken = self.engine.serve(
                _heard(Rollout(task, self._chat, self.rules), stream)
                for task in candidates
                for stream in self._own_streams([task] * rows)
            )
            groups.extend(spoken[first : first + rows] for first in range(0, len(spoken), rows))
            return [[rollout.reward() for rollout, _ in group] for group in groups]

        rewards = zip(*processes.gather(sample))  # of each candidate, the parts of all processes
        mixed = [place for place, parts in enumerate(rewards) if len({reward for part in parts for reward in part}) > 1]
        chosen = mixed[0] if mixed else 0
        dropped = range(chosen) if mixed else range(1, len(candidates))
        self._drawn = [turns for _, turns in groups[chosen]]
        self._dropped = [[rollout for rollout, _ in groups[place]] for place in dropped]
        return candidates[chosen]

    def _own_streams(self, tasks: Sequence[Task]) -> list[RandomStream]:
        """Those of this process's rows of a batch; a group may be spread over processes."""
        first = processes.rank() * len(tasks)
        numbered = enumerate(tasks, first)
        return [RandomStream(self.rules.agent.seed, task.task_id, row % self.num_generations) for row, task in numbered]

    def _compute_loss(self, model, inputs):
        self._batch = inputs
        return super()._compute_loss(model, inputs)

    def _generate(self, prompts):
        self._rollouts = [Rollout(task, self._chat, self.rules) for task in self._tasks]
        self._rows = None
        self._streams = self._own_streams(self._tasks)
        self._logprobs = [[] for _ in prompts]
        generated = super()._generate(prompts)
        processes.all_ranks(partial(self._prove, *generated[:3]))
        return generated

    def _prove(self, prompt_ids, ids, masks) -> None:
        for row, environment in enumerate(self.environments):
            raise_fault(environment)
            prove(self._rollouts[row], prompt_ids[row], ids[row], masks[row], events(environment))

    def _generate_single_turn(self, prompts):
        if self._rows is not None:
            return self._sample_turn(prompts)
        # First turn: TRL passes the same conversation objects again in later turns.
        self._rows = {id(conversation): row for row, conversation in enumerate(prompts)}
        return processes.all_ranks(partial(self._sample_turn, prompts))

    def _tool_call_loop(self, *turns):
        """The turns after the first; how many, each process has for itself."""
        return processes.all_ranks(partial(super()._tool_call_loop, *turns))

    def _sample_turn(self, prompts):
        """One turn of the rollouts of these conversations."""
        rows = [self._rows[id(conversation)] for conversation in prompts]
        rollouts = [self._rollouts[row] for row in rows]
        sample = self._sample_natively if self.engine is None else self._sample_by_engine
        prompt_ids, sampled = sample(prompts, rows)
        kept = []
        for rollout, row, prompt, ids in zip(rollouts, rows, prompt_ids, sampled, strict=True):
            expected = rollout.prompt + rollout.ids
            # A cut observation ends the rollout; TRL renders it whole once more before it cuts it itself.
            if prompt[: len(expected)] != expected or (rollout.open and len(prompt) != len(expected)):
                raise CheckFailed(f"{rollout.task.task_id}: the policy was conditioned on other tokens than its stream")
            ids = ids[: rollout.budget] if rollout.open else []
            if ids:
                begin_turn(self.environments[row], len(rollout.turns))
                rollout.add_turn(ids)
            kept.append(ids)
        return prompt_ids, kept, None, {}  # no log-probabilities: the loss takes the trainer's own

    def _sample_natively(self, prompts, rows):
        # A row whose budget is spent is still asked for: it rides along for one token, which is dropped.
        rollouts = [self._rollouts[row] for row in rows]
        self.generation_config.max_new_tokens = max(rollout.budget if rollout.open else 1 for rollout in rollouts)
        prompt_ids, sampled, _, _ = super()._generate_single_turn(prompts)
        return prompt_ids, sampled

    def _sample_by_engine(self, prompts, rows):
        rendered = self.processing_class.apply_chat_template(prompts, add_generation_prompt=True, return_dict=False)
        open_ = [place for place, row in enumerate(rows) if self._rollouts[row].open]
        if self._drawn:
            turns = [self._drawn[rows[place]][len(self._rollouts[rows[place]].turns)] for place in open_]
        else:
            turns = self.engine.turns(
                [rendered[place] for place in open_],
                [self._rollouts[rows[place]].budget for place in open_],
                [self._streams[rows[place]] for place in open_],
            )
        sampled = [[] for _ in rows]
        for place, turn in zip(open_, turns):
            sampled[place] = turn.ids
            self._logprobs[rows[place]] += turn.logprobs
        return rendered, sampled

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **options):
        found = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **options
        )
        if options.get("compute_entropy") and self.engine is not None:  # the policy's own forward pass, in the loss
            self._compare_logprobs(found[0].detach().float())
        return found

    def _compare_logprobs(self, logprobs) -> None:
        """Log how far the engine's log-probabilities are from the trainer's, on the policy's own tokens."""
        policy = (self._batch["completion_mask"] * self._batch["tool_mask"]).bool()
        gaps = (logprobs - self._batch[SAMPLED]).abs()[policy].tolist()
        gaps = [gap for part in processes.gather(lambda: gaps) for gap in part]
        self._metrics["train"]["logprob_gap/mean"].append(sum(gaps) / len(gaps))
        self._metrics["train"]["logprob_gap/quantile"].append(quantile(gaps, GAP_QUANTILE))
        self._metrics["train"]["logprob_gap/max"].append(max(gaps))

    def _shaped_reward(self, prompts, **_) -> list[float]:
        """The training reward of each rollout; its events were proved equal to the environment's."""
        rewards = [rollout.reward() for rollout in self._rollouts]
        if len(rewards) != len(prompts):  # TRL would broadcast a single reward over the batch
            raise CheckFailed(f"trainer: {len(rewards)} rewards for {len(prompts)} rollouts")
        return rewards


def dataset_row(task: Task) -> dict:
    """A task as a row of TRL's dataset."""
    return {"prompt": task.messages(), "task": task.record()}


def _heard(rollout: Rollout, stream: RandomStream) -> Dialogue:
    """The conversation that samples ``rollout``; its result is the rollout and what was sampled, turn by turn."""
    turns = []
    while rollout.open:
        turns.append((yield Request(rollout.prompt + rollout.ids, rollout.budget, stream)))
        rollout.add_turn(turns[-1].ids)
    return rollout, turns


def quantile(values: list[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def prove(rollout: Rollout, prompt_ids, ids, mask, happened) -> None:
    """The raw-span contract of one rollout as TRL is about to train on it.

    Raises:
        CheckFailed: names the task and what does not hold.
    """

    def broken(what: str):
        raise CheckFailed(f"raw spans of {rollout.task.task_id}: {what}")

    if len(ids) != len(mask):
        broken(f"{len(ids)} tokens but {len(mask)} mask entries")
    if prompt_ids != rollout.prompt:
        broken("the prompt is not the rendered conversation")
    if [token for token, own in zip(ids, mask) if own] != [token for span in rollout.spans for token in span]:
        broken("the tokens with loss are not the sampled ones")
    if ids != rollout.ids or mask != rollout.mask:
        broken("glue or observations differ from the derivation, or carry loss")
    if happened != rollout.events():
        broken("the environment saw other calls than the sampled turns make")


class _AnyTool(dict):
    """TRL's table of one environment's tools, which answers to every name the policy may invent."""

    def __init__(self, environment: Environment):
        super().__init__()
        self._environment = environment

    def __contains__(self, name) -> bool:
        return True

    def __getitem__(self, name):
        return partial(_execute, self._environment, name)


def _execute(environment, name, /, **arguments) -> str:
    return execute(environment, name, arguments)
