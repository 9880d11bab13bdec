"""One rollout as a token stream, and how it is sampled.

A rollout is fully determined by its task and the sampled ids of its assistant turns: everything else (calls,
observations, glue, masks, outcome, reward) follows. :class:`Rollout` is that derivation. Training checks TRL's
stream against it, the evaluations sample through it, and the replay repeats it from the recorded ids.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from recipe.config import Agent, Rules
from recipe.policy.chat import Call, Chat, Turn, parse_turn
from recipe.policy.decoding import Dialogue, RandomStream, Request
from recipe.run.evidence import RolloutRecord, TurnRecord
from recipe.task.environment import MAX_ARGUMENT, Event, begin_turn, events, execute, tools
from recipe.task.family import Family, Task
from recipe.task.outcome import Outcome


class Rollout:
    """The stream of one rollout, grown turn by turn.

    ``ids`` and ``mask`` run over the completion (policy turns, glue and observations, without the prompt) and are
    at most ``agent.max_tokens`` long; ``mask`` is 1 on the policy's tokens alone. ``spans`` holds the sampled ids
    of each turn. ``open`` says whether the policy may go on.
    """

    def __init__(self, task: Task, chat: Chat, rules: Rules):
        self.task, self._chat, self._rules = task, chat, rules
        self._environment = rules.family.environment()
        self._environment.reset(task.record())
        self.prompt = chat.prompt(task.messages())
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.spans: list[list[int]] = []
        self.turns: list[Turn] = []
        self.open = True
        self._cut = False

    @property
    def budget(self) -> int:
        """Tokens that the next turn may take."""
        return self._rules.agent.max_tokens - len(self.ids)

    def add_turn(self, sampled: Sequence[int]) -> None:
        """Add one sampled turn: execute its calls, append their observations, decide whether to go on.

        Raises:
            ValueError: ids that sampling cannot have given here; a tampered record may hold anything.
        """
        if not self.open or not 0 < len(sampled) <= self.budget:
            raise ValueError(f"{self.task.task_id}: a turn of {len(sampled)} tokens does not fit the rollout")
        if not all(type(token) is int and token >= 0 for token in sampled):
            raise ValueError(f"{self.task.task_id}: a turn holds what is no token id")
        if self._chat.end_id in sampled[:-1]:
            raise ValueError(f"{self.task.task_id}: a turn goes on after its end token")
        if sampled[-1] != self._chat.end_id and len(sampled) < self.budget:
            raise ValueError(f"{self.task.task_id}: a turn stops before its end token, with budget left")
        turn = self._chat.parse(sampled)
        self.spans.append(list(sampled))
        self.turns.append(turn)
        self._append(sampled, 1)
        self._cut = not turn.finished
        self.open = False
        if turn.calls and len(self.turns) <= self._rules.agent.max_tool_iterations:
            begin_turn(self._environment, len(self.turns) - 1)
            observations = [execute(self._environment, call.name, call.arguments) for call in turn.calls]
            self._append(self._chat.observe(observations), 0)
            self.open = self.budget > 0
            self._cut = not self.open

    def _append(self, ids: Sequence[int], mask: int) -> None:
        kept = list(ids)[: self.budget]
        self.ids += kept
        self.mask += [mask] * len(kept)

    def events(self) -> tuple[Event, ...]:
        return events(self._environment)

    def outcome(self) -> Outcome:
        tokens = sum(map(len, self.spans))
        return self._rules.family.judge(self.task, self.turns, self.events(), hit_cap=self._cut, tokens=tokens)

    def reward(self) -> float:
        """The shaped training reward under the frozen weights."""
        return self._rules.family.reward(self.outcome(), self._rules.weights)

    def record(self, kind: type[RolloutRecord] = RolloutRecord, **beside) -> RolloutRecord:
        """All of the rollout as evidence; ``beside`` are the fields that ``kind`` adds."""
        return kind(
            task_id=self.task.task_id,
            prompt_ids=self.prompt,
            ids=self.ids,
            mask=self.mask,
            spans=self.spans,
            turns=[TurnRecord(turn.text, turn.finished, len(turn.calls)) for turn in self.turns],
            events=list(self.events()),
            outcome=asdict(self.outcome()),
            reward=self.reward(),
            **beside,
        )


def replay(task: Task, spans: Sequence[Sequence[int]], chat: Chat, rules: Rules) -> Rollout:
    """The rollout that these sampled turns make."""
    rollout = Rollout(task, chat, rules)
    for span in spans:
        rollout.add_turn(span)
    return rollout


def dialogue(rollout: Rollout, stream: RandomStream) -> Dialogue:
    """The conversation that samples ``rollout`` to its end, which is its result; for a decoder's ``serve``."""
    while rollout.open:
        sampled = yield Request(rollout.prompt + rollout.ids, rollout.budget, stream)
        rollout.add_turn(sampled.ids)
    return rollout


def agent_chat(tokenizer, family: Family) -> Chat:
    """Chat with the tool schemas that TRL makes from the environment's methods, in TRL's order."""
    from transformers.utils import get_json_schema

    environment = family.environment()
    return Chat(tokenizer, [get_json_schema(getattr(environment, name)) for name in tools(family.environment)])


# Misused tools: arguments that are unknown, empty, unfinished, too large, too deep or too long.
_MISUSE = ("?", "", "(", "9" * 99, "-" * 60 + "1", "?" * (MAX_ARGUMENT + 1))


def observations(family: Family, task: Task) -> Iterator[str]:
    """What the tools answer to the family's own scripts and to misuse, by which every sentence of theirs is heard."""
    calls = [Call("", {}), Call("?", {})]
    for name, parameter in tools(family.environment).items():
        calls += [Call(name, {}), Call(name, {parameter: 1}), *(Call(name, {parameter: text}) for text in _MISUSE)]
    for script in (family.careful, *(probe.script for probe in family.probes)):
        for _, visible in script(task):
            calls += parse_turn(visible, finished=True).calls
    environment = family.environment()
    environment.reset(task.record())
    for call in calls:
        yield execute(environment, call.name, call.arguments)


def rollout_context(chat: Chat, agent: Agent, tasks: Iterable[Task]) -> int:
    """Most tokens of a rollout of one of ``tasks``, prompt and completion."""
    return max(len(chat.prompt(task.messages())) for task in tasks) + agent.max_tokens
