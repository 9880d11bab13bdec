"""The decoding engine: many conversations sampled side by side, at the speed at which the GPU reads the weights.

``rows`` slots of a static cache hold one conversation each. A token step serves all of them in one captured CUDA
graph, whatever their lengths: positions, budgets, random numbers and the end of a turn live on the device. The
host looks every few steps which rows ended, hands their turns over, and gives free slots to who waits.

* **Prefixes are kept.** A prompt that extends what a slot has read costs only its new tokens, and what the
  prompts of a batch share is read once. Which weights the
  cache was read with is part of it: before anything is sampled the engine sums the bits of every weight and drops
  all prefixes when a sum changed, however the weights were changed and whoever changed them.
* **Randomness is the row's own**: one number of its stream a sampled token, the same that :mod:`recipe.policy.decoding`
  takes, so that a conversation depends neither on its neighbours nor on its slot.
* **Budgets bound what is generated**: a row that has spent its own stands still.

On the CPU the same code runs without kernels and graphs.
"""

from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from recipe.errors import CheckFailed
from recipe.policy import Sampling
from recipe.policy.decoding import Decoder, Dialogue, Request, Sampled, warpers
from recipe.policy.engine.model import TOGETHER, Cache, Tokens, TorchAttention, TorchLinear, TorchSums, forward, read

CHUNKS = (256, 2048)  # prompt tokens that one forward reads: some, or many at a time
STEPS = 4  # token steps between two looks at which rows ended
LEAST_COPY = 16  # tokens that are rather copied from a neighbour's cache than read
MOST_ROWS = 256  # whose logits and scratch are still small beside the weights


@dataclass
class _State:
    """What the token step reads and advances, one entry a row. ``tokens`` are the next to be read."""

    tokens: Tokens
    counts: torch.Tensor  # tokens sampled in this turn
    budgets: torch.Tensor
    uniforms: torch.Tensor  # (rows, context), the numbers of this turn
    sampled: torch.Tensor  # (rows, context)
    logprobs: torch.Tensor  # (rows, context)
    fault: torch.Tensor  # bits: 1 log-probability not a number, 2 too many ties

    @classmethod
    def empty(cls, rows: int, context: int, device) -> "_State":
        def zeros(*size, kind=torch.int32):
            return torch.zeros(size, dtype=kind, device=device)

        status = zeros(rows + 1)  # one buffer, so that one copy tells the host both
        tokens = Tokens(zeros(rows), torch.arange(rows, dtype=torch.int32, device=device), zeros(rows), status[:rows])
        wide = (rows, context)
        return cls(
            tokens, zeros(rows), zeros(rows), zeros(*wide, kind=torch.float64), zeros(*wide),
            zeros(*wide, kind=torch.float32), status[rows:],
        )  # fmt: skip

    def status(self) -> list[int]:
        """``live`` of every row, and ``fault``; waits for the device."""
        return torch.cat([self.tokens.live, self.fault]).tolist()


class Engine(Decoder):
    """Speaks for a ``Qwen3ForCausalLM``, or a PEFT LoRA model around one, where it lies and in its own type.

    :meth:`serve` keeps the slots filled from a queue of conversations. The model is never copied or changed, and may
    be trained between two calls.

    Args:
        pad_id: any id; stands where there is no token.
        rows: slots, of which it makes at most :data:`MOST_ROWS`.
        context: most tokens of a conversation.
    """

    def __init__(self, model, sampling: Sampling, end_id: int, pad_id: int, *, rows: int, context: int):
        self._model, self.sampling, self._end_id, self._pad_id = model, sampling, end_id, pad_id
        self._rows = rows = min(rows, MOST_ROWS)
        self._context = context
        self._device = next(model.parameters()).device
        self._fused = self._device.type == "cuda"
        self._read: list[list[int]] = [[] for _ in range(rows)]  # ids whose keys and values each slot holds
        self._signature = self._sums = None
        with self._inference():
            self._cache = Cache(model, rows, context)
            self._state = _State.empty(rows, context, self._device)
            self._chunks = {size: torch.zeros((4, size), dtype=torch.int32, device=self._device) for size in CHUNKS}

    def serve(self, dialogues: Iterable[Dialogue], finished: Callable[[], object] = lambda: None) -> list:
        """Hold all conversations, at most ``rows`` at a time, and return their results in order.

        ``dialogues`` is read as slots become free; ``finished`` is called as each conversation ends.

        Raises:
            ValueError: a request without prompt or budget, or beyond the context.
            CheckFailed: the model's probabilities are not numbers.
        """
        with self._inference():
            self._refresh_weights()
            try:
                return self._serve(enumerate(dialogues), finished)
            finally:
                self._state.tokens.live.zero_()
                self._state.fault.zero_()

    def _serve(self, dialogues, finished) -> list:
        results: dict[int, object] = {}
        speaking: dict[int, tuple[int, Dialogue, Request]] = {}  # by slot
        ready: list[tuple[int, Dialogue, Request]] = []

        def go_on(number: int, dialogue: Dialogue, sampled: Sampled | None) -> None:
            try:
                ready.append((number, dialogue, dialogue.send(sampled)))
            except StopIteration as end:
                results[number] = end.value
                finished()

        while True:
            while len(speaking) + len(ready) < self._rows and (following := next(dialogues, None)):
                go_on(*following, None)
            if ready:
                free = [slot for slot in range(self._rows) if slot not in speaking]
                slots = self._admit([request for _, _, request in ready], free)
                speaking |= zip(slots, ready)
                ready = []
            if not speaking:
                return [results[number] for number in sorted(results)]
            for _ in range(STEPS):
                self._step()
            *live, fault = self._state.status()
            if fault:
                raise CheckFailed(
                    "engine: a log-probability is not a number" if fault & 1 else "engine: too many ties at the top-k"
                )
            ended = [slot for slot in speaking if not live[slot]]
            for slot, sampled in zip(ended, self._collect(ended)):
                number, dialogue, request = speaking.pop(slot)
                if self.sampling.temperature:
                    request.stream.skip(len(sampled.ids))
                self._read[slot] = [*request.prompt, *sampled.ids[:-1]]  # the last one was never read
                go_on(number, dialogue, sampled)

    def _collect(self, slots: list[int]) -> list[Sampled]:
        """What the rows of these slots sampled."""
        if not slots:
            return []
        state, index = self._state, torch.tensor(slots, device=self._device)
        counts = state.counts[index].tolist()
        longest = max(counts)
        ids, logprobs = state.sampled[index, :longest].tolist(), state.logprobs[index, :longest].tolist()
        return [Sampled(row[:count], logs[:count]) for row, logs, count in zip(ids, logprobs, counts)]

    def _admit(self, requests: list[Request], free: list[int]) -> list[int]:
        """Give every request the free slot that holds most of its prompt, read the rest, and sample its turn.

        The last token of a prompt is always left to the token step, whose logits are those of the first sample.
        """
        for request in requests:
            if not request.prompt or request.budget < 1 or len(request.prompt) + request.budget > self._context:
                raise ValueError(
                    f"engine: {len(request.prompt)} prompt tokens and a budget of {request.budget} in a context of "
                    f"{self._context}"
                )
        held = {
            (place, slot): _common(self._read[slot], request.prompt[:-1])
            for place, request in enumerate(requests)
            for slot in free
        }
        slots = [-1] * len(requests)
        for place, slot in sorted(held, key=lambda pair: (-held[pair], pair)):
            if slots[place] < 0 and slot not in slots:
                slots[place] = slot
        for slot in slots:
            self._read[slot] = []  # until the turn is over
        places = enumerate(zip(requests, slots))
        self._read_prompts([(request.prompt[:-1], slot, held[place, slot]) for place, (request, slot) in places])
        self._start_rows(requests, torch.tensor(slots, device=self._device))
        return slots

    def _read_prompts(self, prompts: list[tuple[list[int], int, int]]) -> None:
        """Fill the cache with prompts, each (ids, slot, how many the slot holds).

        What two of them share is read once and copied: the rows of a group ask the same.
        """
        readers: list[tuple[list[int], int]] = []
        first, copies, second = [], [], []
        for ids, slot, start in prompts:
            shared, donor = max(((_common(other, ids), donor) for other, donor in readers), default=(0, 0))
            copied = shared >= start + LEAST_COPY
            if copied:
                copies.append((donor, slot, start, shared))
                start = shared
            else:
                readers.append((ids, slot))
            rest = second if copied else first
            rest += [(id, slot, position, 1) for position, id in enumerate(ids[start:], start)]
            rest += [(self._pad_id, slot, 0, 0)] * (-len(rest) % TOGETHER)
        self._read_tokens(first)
        for donor, slot, start, end in copies:
            for half in (self._cache.keys, self._cache.values):
                half[:, slot, :, start:end] = half[:, donor, :, start:end]
        self._read_tokens(second)

    def _start_rows(self, requests: list[Request], index) -> None:
        """Set the state of the rows ``index`` to the start of a turn, and make them live."""
        state = self._state
        entries = [(request.prompt[-1], len(request.prompt) - 1, request.budget) for request in requests]
        entries = torch.tensor(entries, dtype=torch.int32).to(self._device)
        state.tokens.ids[index], state.tokens.positions[index], state.budgets[index] = entries.T
        state.counts[index] = 0
        if self.sampling.temperature:
            numbers = torch.zeros((len(requests), max(request.budget for request in requests)), dtype=torch.float64)
            for row, request in zip(numbers, requests):
                row[: request.budget] = torch.from_numpy(request.stream.ahead(request.budget))
            state.uniforms[index, : numbers.shape[1]] = numbers.to(self._device)
        state.tokens.live[index] = 1

    def _read_tokens(self, tokens: list[tuple[int, int, int, int]]) -> None:
        """Fill the cache with tokens, each (id, slot, position, live); those of a slot in order, and padded."""
        while tokens:
            many = self._fused and len(tokens) > CHUNKS[1] // 2  # padding is computed too
            size = CHUNKS[many]
            self._read_chunk(size, tokens[:size])
            tokens = tokens[size:]

    def _read_chunk(self, size: int, tokens: list[tuple[int, int, int, int]]) -> None:
        """At most ``size`` tokens in one forward."""
        if size not in self._readers:
            self._chunks[size].zero_()
            self._readers[size] = self._make_reader(size)
        tokens = tokens + [(self._pad_id, 0, 0, 0)] * (size - len(tokens))
        self._chunks[size].copy_(torch.tensor(tokens, dtype=torch.int32).T)
        self._readers[size]()

    def _refresh_weights(self) -> None:
        """Find the weights where they are now; drop what was captured for others, and prefixes read with others."""
        weights = read(self._model)
        if weights.signature() != self._signature:
            self._signature = weights.signature()
            self._prepare(weights)
            self._sums = None
        self._add_up()
        sums = self._totals.tolist()
        if sums != self._sums:
            self._sums, self._read = sums, [[] for _ in range(self._rows)]

    def _prepare(self, weights) -> None:
        """Build the forwards for these weights, and capture them where there are graphs."""
        # Nothing here may hold the engine itself: in a cycle its graphs would be freed whenever the collector runs,
        # and a capture of another engine under way would be lost.
        state, sampling, layers, fused, device = self._state, self.sampling, len(weights.layers), self._fused, self._device
        cache, chunks = self._cache, self._chunks
        tensors = weights.tensors()
        self._totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
        if fused:
            from recipe.policy.engine.attention import TritonAttention
            from recipe.policy.engine.linear import TritonLinear
            from recipe.policy.engine.sampling import TritonSampler
            from recipe.policy.engine.sums import TritonSums

            def parts(rows: int, reading: bool):
                return TritonLinear(rows, layers, device), TritonAttention(cache, rows, reading=reading)

            sampler = TritonSampler if TritonSampler.covers(sampling) else TorchDraw
            add_up = TritonSums(tensors, self._totals)
        else:

            def parts(rows: int, reading: bool):
                return TorchLinear(), TorchAttention(cache)

            sampler, add_up = TorchDraw, TorchSums(tensors, self._totals)
        pool = torch.cuda.graph_pool_handle() if fused else None
        products, attention = parts(self._rows, False)
        draw = sampler(sampling, self._end_id)

        def captured(work: Callable[[], None]) -> Callable[[], None]:
            return _Captured(work, pool) if fused else work

        def step() -> None:
            hidden = forward(weights, products, attention, state.tokens)
            draw(products.logits(hidden, weights.norm, weights.head), state)

        def make_reader(size: int) -> Callable[[], None]:
            products, attention = parts(size, True)
            return captured(lambda: forward(weights, products, attention, Tokens(*chunks[size])))

        self._add_up, self._step = captured(add_up), captured(step)
        self._make_reader, self._readers = make_reader, {}  # each when it is first needed

    @contextmanager
    def _inference(self):
        """No gradients, no autocast, and the device of the model as the current one."""
        here = torch.cuda.device(self._device) if self._fused else nullcontext()
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False), here:
            yield


class TorchDraw:
    """Draws in PyTorch, with transformers' own processors, and advances the rows as the kernel does."""

    def __init__(self, sampling: Sampling, end_id: int):
        self._warp, self._temperature, self._end_id = warpers(sampling), sampling.temperature, end_id

    def __call__(self, logits, state: _State) -> None:
        logits, tokens = logits.float(), state.tokens
        if self._temperature == 0:
            drawn = logits.argmax(-1, keepdim=True)
        else:
            cumulative = self._warp(None, logits).softmax(-1).double().cumsum(-1)
            uniform = state.uniforms.gather(1, state.counts.long().unsqueeze(1))
            # Scaled by the sum, so that rounding in the last place cannot push the draw past the support.
            drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
            drawn = drawn.clamp(max=logits.shape[1] - 1)  # where nothing is a number
        logprobs = (logits / (self._temperature or 1.0)).log_softmax(-1).gather(1, drawn)
        live = tokens.live.bool()
        state.fault.logical_or_((logprobs.squeeze(1).isnan() & live).any())
        place = state.counts.long().unsqueeze(1)
        for buffer, value in ((state.sampled, drawn.int()), (state.logprobs, logprobs)):
            buffer.scatter_(1, place, torch.where(live.unsqueeze(1), value, buffer.gather(1, place)))
        drawn = drawn.squeeze(1).int()
        tokens.ids.copy_(torch.where(live, drawn, tokens.ids))
        tokens.positions.add_(tokens.live)
        state.counts.add_(tokens.live)
        tokens.live.mul_((drawn != self._end_id) & (state.counts < state.budgets))


class _Captured:
    """``work`` as one graph; replayed by a call.

    It runs once before, which compiles its kernels; no row is live then. The graph holds addresses alone, so
    ``work``, and with it every buffer that it uses, is kept as long as the graph.
    """

    def __init__(self, work: Callable[[], None], pool):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        self._work, self._graph = work, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            work()

    def __call__(self) -> None:
        self._graph.replay()


def _common(one: list[int], other: list[int]) -> int:
    """Length of the longest common prefix, by bisection: comparing slices is fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
