"""A tiny Qwen3 checkpoint to try the whole recipe with: it speaks the real chat and calls the real tools.

    python -m recipe.practice --output runs/practice

It is trained on :mod:`recipe.practice.demonstrations` to partial competence, in minutes on two cores, and written with
all that ``experiments.prepare`` needs::

    OUTPUT/
      checkpoint/      model, tokenizer, and practice.json: what it was made by and is; marks its plans as practice
      questions.tsv    small German sums: question, tab, answer
      retention-baseline/   how the checkpoint answers them (recipe.mgsm.baseline)
      practice.yaml    overrides of the configuration for a policy of this size

``recipe/practice/shipped`` is such a folder, made with the defaults.

What makes it fast: long tokens (below), logits for the policy's own tokens alone, matrices trained by Muon, and a
first phase in which an example starts at its first call, so that copying is learned on short sequences.
"""

import argparse
import os
import random
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recipe.config import Evaluation, Rules, complete
from recipe.errors import Refused
from recipe.files import follow_umask, sync_folder, tree_digests, write_bytes, write_json
from recipe.policy import PRECISIONS
from recipe.policy.chat import CALL, END_CALL, END_THINK, THINK, Chat
from recipe.practice import demonstrations
from recipe.practice.demonstrations import Example
from recipe.progress import Progress
from recipe.run.plan import PRACTICE
from recipe.task import FAMILIES
from recipe.task.family import Family

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = (CALL, END_CALL, "<tool_response>", "</tool_response>", THINK, END_THINK)  # not special, as in Qwen3

POSITIONS = 4096
QUESTIONS = 64
RETENTION_TOKENS = 64  # a sum takes about 20; the protocol's default leaves room for real reasoning


@dataclass(frozen=True)
class Training:
    """How the checkpoint is made. The defaults are those of the shipped one: about 0.8 million parameters."""

    task: str = FAMILIES[0]
    hidden: int = 128
    layers: int = 3
    heads: int = 2
    steps: int = 400
    batch: int = 32  # tasks a step, with half as many sums
    learning_rate: float = 3e-3  # AdamW's, for embeddings and norms; Muon's, for matrices, is ten times that
    seed: int = 1  # of 0 and 1 the one that GRPO makes more of: 56% to 100% strict success, not 56% to 75%
    device: str = "cpu"
    precision: str = "float32"  # that weights are saved in; on a GPU they are trained under bfloat16 autocast

    short: float = 0.6  # share of the steps in which examples start at their first call
    pool: int = 4000  # tasks that the batches are drawn from; too few are learned by heart

    @property
    def rules(self) -> Rules:
        """The family's default protocol: what is demonstrated."""
        return complete({"task": self.task}).rules


@dataclass(frozen=True)
class Mark:
    """``practice.json``: what a practice checkpoint was made by, and the SHA-256 of each file that this made."""

    practice: bool
    parameters: int
    training: Training
    loss: float  # nats a token at the end of the training
    threads: int
    versions: dict[str, str]
    files: dict[str, str]


def practise(output: Path, training: Training, tokenizer_path: Path | None = None) -> None:
    """Make the folder ``output``, whole or not at all.

    Raises:
        Refused: ``output`` exists, or the training or the tokenizer does not fit.
    """
    output = Path(output).resolve()
    if output.exists():
        raise Refused(f"the output exists already: {output}; choose a new one")
    if training.hidden % (2 * training.heads):
        raise Refused(f"--hidden {training.hidden} must be a multiple of twice --heads {training.heads}")
    if not 0 < training.learning_rate < 1:
        raise Refused(f"--learning-rate {training.learning_rate} must lie between 0 and 1")
    from recipe.mgsm import baseline
    from recipe.policy import checkpoint

    if training.device == "cuda" and checkpoint.device() != "cuda":
        raise Refused("--device cuda: there is no GPU here; leave it out")
    tokenizer = small_tokenizer(training.rules, training.seed) if tokenizer_path is None else checkpoint.load_tokenizer(tokenizer_path)
    family = training.rules.family
    (task,) = demonstrations.fresh_tasks(family, training.seed, 1)
    _agent_chat(tokenizer, family).check(task.messages(), "0")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        model, loss = train(tokenizer, training)
        save(temporary / "checkpoint", model, tokenizer, training, loss)
        questions = "".join(f"{s.question}\t{s.answer}\n" for s in demonstrations.sums(training.seed + 1, QUESTIONS))
        write_bytes(temporary / "questions.tsv", questions.encode())
        write_bytes(temporary / "practice.yaml", overrides(training).encode())
        baseline.record(
            temporary / "checkpoint",
            temporary / "questions.tsv",
            temporary / "retention-baseline",
            baseline.Protocol(
                max_new_tokens=RETENTION_TOKENS, batch_size=QUESTIONS, decoder=decoder(training)
            ),
            Evaluation().precision,
            QUESTIONS,
        )
        os.rename(temporary, output)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    sync_folder(output.parent)


# Digits and the symbols of identifiers stand alone, so that copying one is copying tokens; JSON starts a token, so
# that the call in the prompt and the one to be made are the same tokens; otherwise a whole line may become one.
_PIECES = r"[0-9]|[A-Z](?![a-z])|\n|\{[^\nA-Z0-9]*"


def small_tokenizer(rules: Rules, seed: int, vocabulary: int = 1024):
    """Byte-level BPE with Qwen3's control tokens and template, learned from prompts and demonstrations.

    Its tokens may span words: a prompt takes some 115 of them, where Qwen3's own tokenizer takes 414.
    """
    from tokenizers import trainers

    untrained = _tokenizer([], None)
    chat = _agent_chat(untrained, rules.family)
    control = "|".join(re.escape(token) for token in (*SPECIAL, *MARKS))
    texts = [
        piece
        for example in (*demonstrations.tasks(chat, rules, seed, 250), *demonstrations.arithmetic(Chat(untrained), seed, 500))
        for piece in re.split(control, chat.decode(example.ids))
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, min_frequency=30, initial_alphabet=_alphabet(), show_progress=False
    )
    return _tokenizer(texts, trainer)


def _alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _tokenizer(texts: Iterable[str], trainer):
    """A tokenizer trained on ``texts``; without a trainer, one token a byte."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl.chat_template_utils import qwen3_chat_template

    backend = Tokenizer(models.BPE({symbol: place for place, symbol in enumerate(_alphabet())}, []))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    if trainer is not None:
        backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=qwen3_chat_template,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _agent_chat(tokenizer, family: Family) -> Chat:
    from recipe.rollout import agent_chat

    return agent_chat(tokenizer, family)


def new_model(tokenizer, training: Training):
    """An untrained Qwen3 model for this tokenizer, in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(training.seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=training.hidden,
            intermediate_size=3 * training.hidden,
            num_hidden_layers=training.layers,
            num_attention_heads=training.heads,
            num_key_value_heads=training.heads,
            head_dim=training.hidden // training.heads,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


def train(tokenizer, training: Training):
    """Train a new model on demonstrations; returns it and the mean loss (nats a token) of the last tenth of steps.

    Equal arguments give equal weights on one machine's CPU.
    """
    import torch

    model = new_model(tokenizer, training).to(training.device).train()
    optimizers = _optimizers(model, training.learning_rate)
    schedule = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: _rate(step, training.steps)) for one in optimizers]
    losses = []
    with Progress("practice", training.steps, "step") as progress:
        for batch in batches(tokenizer, training):
            losses.append(_step(model, batch, tokenizer.pad_token_id, training.device))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for one in (*optimizers, *schedule):
                one.step()
            model.zero_grad()
            progress.update(loss=f"{losses[-1]:.3f}")
    last = losses[-max(1, training.steps // 10) :]
    return model.eval(), sum(last) / len(last)


def _optimizers(model, learning_rate: float) -> list:
    """Muon (Jordan et al., 2024) for the matrices: copying forms in a third of the steps that AdamW takes for it."""
    import torch

    embedding = model.get_input_embeddings().weight
    matrices, rest = [], []
    for weight in model.parameters():
        (matrices if weight.ndim == 2 and weight is not embedding else rest).append(weight)
    return [
        torch.optim.Muon(matrices, lr=10 * learning_rate, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _rate(step: int, steps: int) -> float:
    """Share of the learning rate: up over the first 20 steps, then down in a line, almost to zero."""
    return min(1.0, (step + 1) / 20) * max(0.03, 1.0 - step / steps)


def batches(tokenizer, training: Training) -> Iterator[list[list[Example]]]:
    """A batch of tasks and one of sums for every step; the first ones short."""
    rng = random.Random(training.seed)
    chat = _agent_chat(tokenizer, training.rules.family)
    shown = list(demonstrations.tasks(chat, training.rules, training.seed, training.pool))
    arithmetic = list(demonstrations.arithmetic(Chat(tokenizer), training.seed, training.pool // 2))
    for step in range(training.steps):
        task_batch = rng.sample(shown, min(training.batch, len(shown)))
        if step < training.short * training.steps:
            task_batch = [example.from_first_call() for example in task_batch]
        yield [task_batch, rng.sample(arithmetic, min(training.batch // 2, len(arithmetic)))]


def _step(model, parts: Sequence[Sequence[Example]], pad_id: int, device: str) -> float:
    """Accumulate the gradient of the mean loss over all policy tokens of a step; returns that loss."""
    import torch
    from torch.nn.functional import cross_entropy

    tokens = sum(sum(example.mask) for part in parts for example in part)
    total = 0.0
    for part in parts:
        width = max(len(example.ids) for example in part)
        # Padded on the right without an attention mask: causal attention never looks there from a real token.
        ids = torch.tensor([example.ids + [pad_id] * (width - len(example.ids)) for example in part], device=device)
        own = torch.tensor([example.mask + [0] * (width - len(example.mask)) for example in part], device=device)
        own = own[:, 1:].bool()
        with torch.autocast(device, torch.bfloat16, enabled=device.startswith("cuda")):
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
            logits = model.lm_head(hidden[own])  # (policy tokens, vocabulary)
        loss = cross_entropy(logits.float(), ids[:, 1:][own], reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    return total


def save(folder: Path, model, tokenizer, training: Training, loss: float) -> None:
    """Write a standalone checkpoint and its mark: what it was made by, and the digests of what that made."""
    import tokenizers
    import torch
    import transformers

    parameters = sum(weight.numel() for weight in model.parameters())
    model.to(getattr(torch, training.precision)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    mark = Mark(
        practice=True,
        parameters=parameters,
        training=training,
        loss=loss,
        threads=torch.get_num_threads(),  # sums over another number round differently
        versions={module.__name__: str(module.__version__) for module in (tokenizers, torch, transformers)},
        files=tree_digests(folder),
    )
    write_json(folder / PRACTICE, asdict(mark))
    follow_umask(folder)


def decoder(training: Training) -> str:
    """The faster decoder where the policy was made: that of its runs."""
    return "engine" if training.device == "cuda" else "native"


def overrides(training: Training) -> str:
    """YAML: what a policy of this size needs set differently from Qwen3."""
    return (
        "# A practice policy is far smaller than Qwen3: its adapter needs larger steps, and memory is plentiful.\n"
        f"task: {training.task}\n"
        f"precision: {training.precision}\n"
        "agent:\n"
        f"  decoder: {decoder(training)}  # the faster one where this policy was made\n"
        "grpo:\n"
        "  learning_rate: 0.001\n"
        "  gradient_checkpointing: false\n"
        "  validation_samples: 1\n"
        "evaluation:\n"
        "  samples_per_task: 4  # a practice run shows nothing about Qwen3: it need not see small differences\n"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of :func:`practise`.

    Raises:
        Refused: as there.
    """
    default = Training()
    parser = argparse.ArgumentParser(
        prog="python -m recipe.practice",
        description="Train a tiny practice checkpoint, with its retention baseline and configuration.",
        epilog=(
            "example on a GPU, with the real tokenizer:\n  python -m recipe.practice --output runs/practice-gpu "
            "--tokenizer /abs/Qwen3 --device cuda --precision bfloat16\n      --hidden 256 --layers 6 --heads 4 "
            "--batch 64 --steps 1500 --pool 20000"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument("--task", choices=FAMILIES, default=default.task, help="family (%(default)s)")
    parser.add_argument("--tokenizer", type=Path, help="folder of a Qwen3 tokenizer to use instead of a small one")
    for name in ("hidden", "layers", "heads", "steps", "batch", "pool"):
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=_positive, default=value, help=f"default: {value}")
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=default.seed, help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default.device, help="default: %(default)s")
    parser.add_argument("--precision", choices=PRECISIONS, default=default.precision, help="default: %(default)s")
    given = vars(parser.parse_args(argv))
    output, tokenizer = given.pop("output"), given.pop("tokenizer")
    practise(output, Training(**given), tokenizer)
    print(f"{output}: checkpoint, retention-baseline and practice.yaml are ready")


def _positive(text: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"must be a positive integer, not {text!r}")
    return int(text)

