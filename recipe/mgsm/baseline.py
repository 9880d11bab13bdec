"""A retention baseline: how a checkpoint answers German problems without tools, and the folder that says so.

It is recorded once for a checkpoint, by its SFT run or by :func:`record`, and read by ``prepare`` as
``--retention-baseline``. Its folder::

    RUN/
      retention.json    layout           version of this layout: 2
                        checkpoint       {"digest": …, "files": {relative path: SHA-256}}, as checkpoint.identity gives
                        protocol         every field of Protocol
                        chat             {"end_id": id that ends a turn, "thinking_opened": whether the generation
                                         prompt opens the thinking}: what reading a text again needs of the tokenizer
                        precision        type that the weights were loaded in: "bfloat16" or "float32"
                        items_sha256     of items.jsonl
                        outputs_sha256   of outputs.jsonl
                        counts           {"items", "correct", "ambiguous", "unreadable"}
                        digest           recipe.files.digest of all fields above
      items.jsonl       one item a line: id (unique), question, answer (plain decimal text: "2125")
      outputs.jsonl     one output a line, in the order of the items:
                        id               of the item
                        ids              sampled token ids, the end token included
                        text             the ids decoded, without the end token
                        finished         whether the end token was sampled within the budget
                        value            answer read from the text after thinking (plain decimal text), or null
                        ambiguous        whether that reading could be another number (recipe.mgsm.german_numbers)
                        correct          whether the value is the item's answer

All three are canonical JSON (:mod:`recipe.files`), so that equal runs are equal files. A text that was cut off is
read like any other; one whose thinking never closed has no value.
"""

import io
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from recipe.errors import CheckFailed, Refused
from recipe.files import digest, file_digest, real, sync_folder, write_json, write_lines
from recipe.mgsm.german_numbers import MAX_DIGITS, read_answer, read_gold, write_value
from recipe.policy import PRECISIONS, Sampling, checkpoint, configuration, decoder_choice
from recipe.policy.chat import Chat, Turn, parse_turn
from recipe.progress import Progress
from recipe.records import Inside, Sha256, below, content, read, read_lines, short
from recipe.settings import build, differences, or_zero

LAYOUT = 2
RUN, ITEMS, OUTPUTS = "retention.json", "items.jsonl", "outputs.jsonl"
LIMIT = 64  # items of a retention baseline under the default protocol

_VALUE = re.compile(rf"(?!-0\Z)-?(?:0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})(?:\.[0-9]*[1-9])?")


@dataclass(frozen=True)
class Protocol:
    """How an item is asked and answered: one user message, thinking enabled, no tools.

    ``question`` holds ``{question}`` once. An item's random stream is drawn from ``seed`` and its id.
    """

    system: str | None = None
    question: str = (
        "{question}\n\nDenke Schritt für Schritt nach. Beende deine Nachricht mit einer Zeile der Form „Antwort: ZAHL“."
    )
    max_new_tokens: int = 1024
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = or_zero(42)
    batch_size: int = 32  # recorded, because BF16 rounds differently from one batch to another
    decoder: str = decoder_choice()

    def messages(self, question: str) -> list[dict]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.question.replace("{question}", question)}]


@dataclass(frozen=True)
class Item:
    """One problem; ``answer`` is plain decimal text."""

    id: str
    question: str
    answer: str


@dataclass(frozen=True)
class Output:
    """A line of ``outputs.jsonl``: how one item was answered."""

    id: str
    ids: list[int]
    text: str
    finished: bool
    value: str | None
    ambiguous: bool
    correct: bool


@dataclass(frozen=True)
class Identity:
    """A checkpoint's files by SHA-256; ``digest`` is that of ``files``."""

    digest: Sha256
    files: dict[Inside, Sha256]


@dataclass(frozen=True)
class ChatFacts:
    end_id: int
    thinking_opened: bool


@dataclass(frozen=True)
class Record:
    """``retention.json``."""

    layout: int
    checkpoint: Identity
    protocol: Protocol
    chat: ChatFacts
    precision: str
    items_sha256: Sha256
    outputs_sha256: Sha256
    counts: dict[str, int]
    digest: Sha256


@dataclass(frozen=True)
class RetentionBaseline:
    """A retention baseline whose every field was checked; ``checkpoint`` is the digest of the measured one."""

    folder: Path
    checkpoint: str
    protocol: Protocol
    precision: str
    items: list[Item]
    outputs: list[Output]
    counts: dict[str, int]


def resolve_protocol(values: dict) -> Protocol:
    """Protocol from plain values over the defaults.

    Raises:
        Refused: an unknown key, a wrong type, a value out of range; names the key.
    """
    protocol = build(Protocol, values, "protocol.")
    if protocol.question.count("{question}") != 1:
        raise Refused("configuration: protocol.question must hold {question} exactly once")
    return protocol


def deviations(run: RetentionBaseline) -> dict[str, object]:
    """What differs from the default protocol: its settings, and how many the items are where there are fewer."""
    few = {"items": len(run.items)} if len(run.items) < LIMIT else {}
    return few | differences(asdict(run.protocol), asdict(Protocol()))


def items_from_tsv(path: Path, limit: int = LIMIT) -> list[Item]:
    """The first ``limit`` rows of ``question TAB answer``, without a header; an item's id is its line number.

    Raises:
        Refused: no such file, no rows, or a malformed line (named).
    """
    try:
        text = content(path, "the question file").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(f"the question file is not UTF-8: {path} ({error})") from None
    lines = io.StringIO(text, newline=None)  # only newlines end a line, not all that str.splitlines takes for one
    items = [_item(line.rstrip("\n"), number, f"{path}:{number}") for number, line in zip(range(1, limit + 1), lines)]
    if not items:
        raise Refused(f"the question file has no rows: {path}")
    return items


def _item(line: str, number: int, where: str) -> Item:
    question, *answers = line.split("\t")
    if not question.strip() or len(answers) != 1:
        raise Refused(f"{where}: expected question TAB answer, found {len(answers)} tabs in {line[:60]!r}")
    try:
        return Item(f"item-{number:03d}", question, write_value(read_gold(answers[0])))
    except ValueError as error:
        raise Refused(f"{where}: the answer is {error}") from None


def evaluate(
    model, tokenizer, items: Sequence[Item], protocol: Protocol, finished: Callable[[], object]
) -> list[Output]:
    """Outputs of a model in ``eval()`` mode, in the order of the items.

    ``finished`` is called as each item is answered.

    Raises:
        Refused: a prompt that does not fit the model's positions, or a template that is not Qwen3's.
    """
    from recipe.policy import make_decoder
    from recipe.policy.decoding import RandomStream, Request, one_turn

    chat = Chat(tokenizer)
    chat.check(protocol.messages(items[0].question), "0")
    prompts = [chat.prompt(protocol.messages(item.question)) for item in items]
    positions = model.config.max_position_embeddings
    for item, prompt in zip(items, prompts):
        if len(prompt) + protocol.max_new_tokens > positions:
            raise Refused(
                f"{item.id}: {len(prompt)} prompt tokens and protocol.max_new_tokens={protocol.max_new_tokens} exceed "
                f"the model's {positions} positions; lower max_new_tokens"
            )
    rows, context = min(protocol.batch_size, len(items)), max(map(len, prompts)) + protocol.max_new_tokens
    decoder = make_decoder(protocol.decoder, model, chat, protocol.sampling, rows=rows, context=context)
    turns = decoder.serve(
        (
            one_turn(Request(prompt, protocol.max_new_tokens, RandomStream(protocol.seed, item.id, 0)))
            for item, prompt in zip(items, prompts)
        ),
        finished,
    )
    return [_output(item, turn.ids, chat.parse(turn.ids)) for item, turn in zip(items, turns, strict=True)]


def _output(item: Item, ids: list[int], turn: Turn) -> Output:
    """The record of one sampled turn."""
    reading = read_answer(turn.visible or "")
    value = None if reading.value is None else write_value(reading.value)
    return Output(
        id=item.id,
        ids=ids,
        text=turn.text,
        finished=turn.finished,
        value=value,
        ambiguous=reading.ambiguous,
        correct=value == item.answer,
    )


def counts(outputs: Sequence[Output]) -> dict[str, int]:
    return {
        "items": len(outputs),
        "correct": sum(output.correct for output in outputs),
        "ambiguous": sum(output.ambiguous for output in outputs),
        "unreadable": sum(output.value is None for output in outputs),
    }


def check_outputs(
    outputs: list[Output], items: Sequence[Item], protocol: Protocol, checkpoint_path: Path, where: str
) -> None:
    """Derive every output again from its sampled ids, with the tokenizer of the checkpoint that was measured.

    Raises:
        CheckFailed: names the first record and field that does not hold.
    """
    chat = Chat(checkpoint.load_tokenizer(checkpoint_path))
    _check_outputs(outputs, items, protocol, lambda output: chat.parse(output.ids), where)


def _check_outputs(
    outputs: list[Output], items: Sequence[Item], protocol: Protocol, turn: Callable[[Output], Turn], where: str
) -> None:
    if len(outputs) != len(items):
        raise CheckFailed(f"{where}: {len(outputs)} outputs for {len(items)} items")
    for number, (item, output) in enumerate(zip(items, outputs), 1):
        name = f"{where}:{number} ({below('', item.id)})"
        ids = output.ids
        cut_early = not output.finished and len(ids) < protocol.max_new_tokens
        if not 0 < len(ids) <= protocol.max_new_tokens or cut_early:
            raise CheckFailed(f"{name}: field ids has {len(ids)} tokens, not what ended within the protocol's budget")
        if min(ids) < 0:
            raise CheckFailed(f"{name}: field ids holds something that is not a token id")
        found = asdict(output)
        for key, value in asdict(_output(item, ids, turn(output))).items():
            if found[key] != value:
                raise CheckFailed(f"{name}: field {key} is {short(found[key])}, the record gives {short(value)}")


def load(folder: Path) -> RetentionBaseline:
    """Read a retention baseline and check that all of it holds together; the texts are read again, not sampled again.

    Raises:
        Refused: names the file, record and field that does not hold.
    """
    folder = Path(folder)
    path = folder / RUN
    what = "the retention baseline (experiments.retention_baseline records one)"
    found = read(Record, path, what, (LAYOUT, "record the run again"))
    if found.checkpoint.digest != digest(found.checkpoint.files):
        raise Refused(f"{path}: field checkpoint.digest is not the digest of checkpoint.files")
    if found.precision not in PRECISIONS:
        raise Refused(f"{path}: field precision is not one of {', '.join(PRECISIONS)}")
    protocol = resolve_protocol(asdict(found.protocol))
    items = _load_items(folder / ITEMS)
    outputs = read_lines(Output, folder / OUTPUTS, "the retention baseline's outputs")

    def turn(output: Output) -> Turn:
        return parse_turn(output.text, output.ids[-1] == found.chat.end_id, found.chat.thinking_opened)

    try:
        _check_outputs(outputs, items, protocol, turn, str(folder / OUTPUTS))
    except CheckFailed as failure:
        raise Refused(f"{failure}; record the run again") from None
    if found.counts != counts(outputs):
        raise Refused(f"{path}: field counts is {found.counts}, the outputs give {counts(outputs)}")
    for name, sha in ((ITEMS, found.items_sha256), (OUTPUTS, found.outputs_sha256)):
        if sha != file_digest(folder / name):
            raise Refused(f"{folder / name} was altered: it is not the file that {RUN} names")
    document = asdict(found)
    if document.pop("digest") != digest(document):
        raise Refused(f"{path} was altered: its fields do not give its digest")
    return RetentionBaseline(folder, found.checkpoint.digest, protocol, found.precision, items, outputs, found.counts)


def _load_items(path: Path) -> list[Item]:
    items: dict[str, Item] = {}
    for number, item in enumerate(read_lines(Item, path, "the retention baseline's items"), 1):
        if not _VALUE.fullmatch(item.answer):
            raise Refused(f"{path}:{number} ({below('', item.id)}): field answer is not plain decimal text: {item.answer[:40]!r}")
        if item.id in items:
            raise Refused(f"{path}:{number}: field id {item.id!r} is used twice")
        items[item.id] = item
    if not items:
        raise Refused(f"the retention baseline has no items: {path}")
    return list(items.values())


def record(
    model_path: Path,
    questions: Path,
    output: Path,
    protocol: Protocol,
    precision: str,
    limit: int,
) -> RetentionBaseline:
    """Measure a checkpoint on the first ``limit`` questions of a TSV and record it as the new folder ``output``.

    Raises:
        Refused: an input that does not fit, or an ``output`` that exists or lies inside the checkpoint.
    """
    model_path, output = real(model_path), real(output)
    if output.exists():
        raise Refused(f"the output exists already: {output}; choose a new one")
    if output.is_relative_to(model_path):
        raise Refused(f"the output {output} lies inside the checkpoint, whose digest it would change")
    items = items_from_tsv(questions, limit)
    identity = checkpoint.identity(model_path)
    tokenizer = checkpoint.load_tokenizer(model_path)
    settings = configuration.load(model_path)
    if protocol.decoder == "engine":
        settings.check_engine("the protocol's decoder")
    checkpoint.check_vocabulary(tokenizer, settings, model_path)
    model = checkpoint.load_model(model_path, precision, checkpoint.device())
    with Progress("retention baseline", len(items), "item") as progress:
        outputs = evaluate(model, tokenizer, items, protocol, progress.update)
    write(output, identity, protocol, Chat(tokenizer), precision, items, outputs)
    return load(output)


def write(
    output: Path,
    identity: dict,
    protocol: Protocol,
    chat: Chat,
    precision: str,
    items: Sequence[Item],
    outputs: Sequence[Output],
) -> None:
    """Write the folder drawn above, whole or not at all. ``identity`` is :func:`recipe.policy.checkpoint.identity`'s."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        write_lines(temporary / ITEMS, [asdict(item) for item in items])
        write_lines(temporary / OUTPUTS, map(asdict, outputs))
        document = {
            "layout": LAYOUT,
            "checkpoint": identity,
            "protocol": asdict(protocol),
            "chat": {"end_id": chat.end_id, "thinking_opened": chat.thinking_opened},
            "precision": precision,
            "items_sha256": file_digest(temporary / ITEMS),
            "outputs_sha256": file_digest(temporary / OUTPUTS),
            "counts": counts(outputs),
        }
        write_json(temporary / RUN, {**document, "digest": digest(document)})
        os.rename(temporary, output)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    sync_folder(output.parent)
