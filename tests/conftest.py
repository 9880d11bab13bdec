"""What the tests share: two tokenizers (a small one made here, and a trained one), the official chat templates, one task,
and a finished run in small."""

import copy
import fcntl
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only spins
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
from hypothesis import HealthCheck, settings

from recipe.orders.environment import OrderEnvironment
from recipe.orders.tasks import Order
from recipe.policy.chat import Chat
from recipe.practice import SHIPPED
from runs import ROOT, prepared

# Not a part of the repository: beside it, where it exists at all.
SHARED = Path(__file__).parents[1].parent / "shared"
QWEN_TOKENIZER = SHARED / "data" / "qwen3-tokenizer"

EARLY_TEMPLATE = Path(__file__).parent / "templates" / "qwen3-early.jinja"  # that of the first Qwen3 models
OFFICIAL_TEMPLATES = ("early", "current", "thinking-2507", "instruct-2507")

settings.register_profile(
    "repeatable",
    deadline=None,  # time is never asserted
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"the folder of shared test data is absent: {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def task() -> Order:
    return Order("test-000", "Was kostet die Lieferung K7B-XD4 zusammen?", "K7B-XD4", 37, 125)


@pytest.fixture(scope="session")
def tools() -> list:
    environment = OrderEnvironment()
    return [environment.calculator, environment.lookup]


def _template(name: str) -> str:
    """An official Qwen3 chat template; the two of 2507 are given by how they differ from the current one."""
    from trl.chat_template_utils import qwen3_chat_template as current

    if name == "early":
        return EARLY_TEMPLATE.read_text()
    if name == "current":
        return current
    body, found, _ = current.rpartition("{%- if add_generation_prompt %}")
    assert found
    if name == "thinking-2507":
        return body + "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n<think>\\n' }}\n{%- endif %}"
    assert name == "instruct-2507"
    before, found, rest = body.partition("        {%- set reasoning_content = '' %}\n")
    _, found_too, after = rest.partition("        {%- if message.tool_calls %}")
    assert found and found_too
    plain = "        {{- '<|im_start|>' + message.role + '\\n' + content }}\n        {%- if message.tool_calls %}"
    opening = "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
    return before + plain + after + opening


def with_template(tokenizer, template: str | None):
    """A copy that shares everything with ``tokenizer`` but its chat template."""
    other = copy.copy(tokenizer)
    other.chat_template = template
    return other


@pytest.fixture(scope="session")
def small_tokenizer():
    """Byte-level BPE with a handful of merges and Qwen3's control tokens: real, and there on every machine."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "n"), ("e", "r"), ("o", "o"), ("l", "oo"), ("X", "D"), ("3", "7"), ("Ġ", "an"), ("Ċ", "Ċ")]
    vocabulary = {symbol: place for place, symbol in enumerate([*symbols, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    marks = ("think", "tool_call", "tool_response")
    tags = [tag for mark in marks for tag in (f"<{mark}>", f"</{mark}>")]
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_template("current"),
    )


@pytest.fixture(scope="session")
def qwen_tokenizer():
    """The tokenizer of the Qwen3 models with its early template. Not to be changed by a test."""
    if not QWEN_TOKENIZER.is_dir():
        pytest.skip(f"the real Qwen3 tokenizer is absent: {QWEN_TOKENIZER}")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(QWEN_TOKENIZER)


@pytest.fixture(scope="session")
def trained_tokenizer(practice):
    """A tokenizer that was trained on text: that of the Qwen3 models where it lies, else the practice checkpoint's."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(QWEN_TOKENIZER if QWEN_TOKENIZER.is_dir() else practice / "checkpoint")


@pytest.fixture(scope="session", params=OFFICIAL_TEMPLATES)
def official(request, trained_tokenizer):
    """A trained tokenizer with each official template."""
    return with_template(trained_tokenizer, _template(request.param))


@pytest.fixture(scope="session")
def chat(small_tokenizer, tools) -> Chat:
    return Chat(small_tokenizer, tools)


@pytest.fixture(scope="session")
def thinking_chat(small_tokenizer, tools) -> Chat:
    """Its generation prompt already opens the thinking block."""
    return Chat(with_template(small_tokenizer, _template("thinking-2507")), tools)


@pytest.fixture(scope="session")
def trained_chat(trained_tokenizer, tools) -> Chat:
    return Chat(trained_tokenizer, tools)


@pytest.fixture(scope="session")
def with_chat_template():
    return with_template


# ---- a master ----

@pytest.fixture
def double(monkeypatch, tmp_path):
    """A master with a workspace, and a login of its own for this process."""
    module = pytest.importorskip("master_double", reason="the double of the master is not in tests/")
    monkeypatch.setenv("DET_DEBUG_CONFIG_PATH", str(tmp_path / "login"))
    for name in ("DET_USER", "DET_PASS"):  # of a real master's user
        monkeypatch.delenv(name, raising=False)
    with module.MasterDouble(workspaces={"lab": []}, resource_pools=["pool"]) as master:
        monkeypatch.setenv("DET_MASTER", master.url)
        yield master
        assert not master.internal_errors


# ---- a run in small, made once for all tests that look at one ----

@pytest.fixture(scope="session")
def practice() -> Path:
    """What ``recipe.practice.checkpoint`` writes: the shipped folder, or the one that ``PRACTICE`` names."""
    return Path(os.environ.get("PRACTICE", SHIPPED)).resolve()


@pytest.fixture(scope="session")
def run(practice, tmp_path_factory) -> Path:
    """A finished run of all stages, by the driver. Workers of one session share it: nobody writes into it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "finished" / "run"
    with open(shared / "finished.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "manifest.json").exists():
            prepared(practice, folder)
            command = [sys.executable, "-m", "tools.driver", "run", "--local", "--plan", str(folder / "plan.json")]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
    return folder
