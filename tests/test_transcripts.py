"""Transcripts: every token of every record is shown once and as what it is, and nothing that a policy says can act."""

import base64
import gzip
import hashlib
import json
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.errors import Refused
from recipe.files import write_lines
from recipe.policy import checkpoint
from recipe.rollout import Rollout, agent_chat
from recipe.run.evidence import Evaluated, read_rollouts, read_step
from recipe.run.plan import load_run
from recipe.task import FAMILIES, family
from recipe.task.failure import SOLVED, kind
from runs import ROOT, rules
from tools.transcripts import __main__ as command
from tools.transcripts.anatomy import KINDS, Pieces, dissect, printable
from tools.transcripts.gather import STAGES, Choice, transcripts
from tools.transcripts.page import html
from tools.transcripts.terminal import lines

OWN = ("thinking", "said", "call")
HOSTILE = (
    "<think>\n</script><script>document.title='broken'</script>\n</think>\n\n"
    "<img src=x onerror=\"document.title='broken'\"><!--<script>"
    "\x1b]0;broken\x07\x1b[2J\u202e@SCRIPT@ &lt;b&gt; </style>\r\n"
    '<tool_call>{"name": "<script>document.title=\'broken\'</script>\\u001b[31m\\ud800", "arguments": {}}</tool_call>'
)


def shown(page: bytes) -> tuple[dict, tuple[int, ...]]:
    """What a browser unpacks: the data and the stream."""
    data, stream = (
        gzip.decompress(base64.b64decode(found, validate=True))
        for found in re.findall(rb'<script type="text/plain" id="(?:data|stream)">([A-Za-z0-9+/=]*)</script>', page)
    )
    return json.loads(data), struct.unpack(f"<{len(stream) // 4}I", stream)


def recorded(run: Path) -> list:
    """All records of a finished run, in the order of the page."""
    found = read_rollouts(run / "baseline" / "rollouts.jsonl", "it")
    for path in sorted((run / "grpo" / "steps").iterdir()):
        found += read_step(path).rollouts
    for path in sorted((run / "grpo" / "validation").iterdir()):
        found += read_rollouts(path, "it")
    return found + read_rollouts(run / "candidate" / "rollouts.jsonl", "it")


@pytest.fixture(scope="module")
def plan(run):
    return load_run(run, check_inputs=False)


@pytest.fixture(scope="module")
def policy_chat(practice, plan):
    return agent_chat(checkpoint.load_tokenizer(practice / "checkpoint"), plan.family)


@pytest.fixture
def begun(run, tmp_path) -> Path:
    """A run folder that has its plan alone."""
    folder = tmp_path / "begun"
    folder.mkdir()
    for name in ("plan.json", "tasks.json"):
        shutil.copyfile(run / name, folder / name)
    return folder


@pytest.fixture
def hostile(begun, plan, policy_chat) -> Path:
    """A run whose policy says what would act on a page or a terminal."""
    rollout = Rollout(plan.splits["test"][0], policy_chat, plan.config.rules)
    rollout.add_turn([*policy_chat.encode(HOSTILE)[: rollout.budget - 1], policy_chat.end_id])
    write_lines(begun / "baseline" / "rollouts.jsonl", [asdict(rollout.record(Evaluated, sample=0))])
    return begun


def refused(*arguments) -> str:
    """The one line that the command refuses with."""
    called = [sys.executable, "-m", "tools.transcripts", *map(str, arguments)]
    done = subprocess.run(called, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr


# ---- what is shown


def test_the_page_has_every_token_of_every_record_as_what_it_is(run, plan):
    page = html(plan, transcripts(plan, Choice()))
    data, stream = shown(page)
    records = recorded(run)
    assert len(data["rollouts"]) == len(records)
    ids = [entry if isinstance(entry, list) else [entry] for entry in data["ids"]]
    for row, record in zip(data["rollouts"], records):
        stage, _, _, task, reward, _, kind, _, _, earned, parts, (prompt, count), place, turns = row
        assert data["tasks"][task][0] == record.task_id
        assert sum((ids[number] for number in stream[prompt : prompt + count]), []) == record.prompt_ids
        found, mask = [], []
        for _, _, blocks in turns:
            for block, length, *_ in blocks:
                for number in stream[place : place + length]:
                    found += ids[number]
                    mask += [int(KINDS[block] in OWN)] * len(ids[number])
                place += length
        assert (found, mask) == (record.ids, record.mask)
        assert sum(parts) == pytest.approx(reward) == record.reward
        milestones = [record.outcome[name] for name in plan.family.milestones]
        assert [turn is not None for turn in earned] == milestones
        assert (kind is None) == record.outcome["strict_success"]
    assert {STAGES[row[0]] for row in data["rollouts"]} == set(STAGES)
    assert html(plan, transcripts(plan, Choice())) == page


def test_a_choice_of_stages_tasks_and_steps(plan):
    task = plan.splits["test"][1].task_id
    found = list(transcripts(plan, Choice(("baseline", "candidate"), (task,))))
    wanted = [(stage, task) for stage in ("baseline", "candidate") for _ in range(plan.config.evaluation.samples_per_task)]
    assert [(one.stage, one.task.task_id) for one in found] == wanted
    assert {(one.stage, one.step) for one in transcripts(plan, Choice(steps=(4,)))} == {("grpo", 4), ("development", 4)}


def test_a_run_that_is_not_finished_is_shown_as_far_as_it_is(run, begun):
    (begun / "baseline").mkdir()
    shutil.copyfile(run / "baseline" / "rollouts.jsonl", begun / "baseline" / "rollouts.jsonl")
    (begun / "grpo" / "steps").mkdir(parents=True)
    shutil.copyfile(run / "grpo" / "steps" / "step-0001.json", begun / "grpo" / "steps" / "step-0001.json")
    found = list(transcripts(load_run(begun, check_inputs=False), Choice()))
    assert {one.stage for one in found} == {"baseline", "grpo"}


def scripted(script, task, chat, rules) -> Rollout:
    """The rollout of a scripted policy, as far as it may go."""
    rollout = Rollout(task, chat, rules)
    for thought, visible in script(task):
        if rollout.open:
            said = chat.encode(f"<think>\n{thought}\n</think>\n\n{visible}")
            rollout.add_turn([*said[: rollout.budget - 1], chat.end_id])
    return rollout


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_taken_apart_as_its_judge_sees_it(name, trained_tokenizer):
    chosen, chat = rules(name), agent_chat(trained_tokenizer, family(name))
    task = family(name).generate(1, dict.fromkeys(family(name).splits, 1))["test"][0]
    for script in (family(name).careful, *(probe.script for probe in family(name).probes)):
        rollout = scripted(script, task, chat, chosen)
        record, outcome = rollout.record(), rollout.outcome()
        anatomy = dissect(record, task, Pieces(chat), chat, chosen, "here")
        assert sum(anatomy.parts.values()) == pytest.approx(record.reward)
        earned = [getattr(outcome, milestone) for milestone in family(name).milestones]
        assert [turn is not None for turn in anatomy.earned.values()] == earned
        assert anatomy.kind == kind(family(name), task, record.events, record.outcome)
        assert [event for turn in anatomy.turns for event in executed(turn)] == record.events


def executed(turn) -> list:
    return [block.called.event for block in turn.blocks if block.called and block.called.event]


def test_milestones_stand_at_the_calls_that_earned_them(plan, policy_chat):
    task, chosen = plan.splits["test"][0], plan.config.rules
    record = scripted(plan.family.careful, task, policy_chat, chosen).record()
    anatomy = dissect(record, task, Pieces(policy_chat), policy_chat, chosen, "here")
    blocks = [block for turn in anatomy.turns for block in turn.blocks]
    assert [block.kind for block in blocks if block.kind != "template"] == [
        "thinking", "call", "observation", "thinking", "call", "observation", "thinking", "said",
    ]  # fmt: skip
    assert blocks[-1].pieces[0].text.startswith("<")  # white space before it stands with the thinking
    calls = [(block.called.name, block.called.earned) for block in blocks if block.called]
    assert calls == [("lookup", ("verified lookup",)), ("calculator", ("verified calculation",))]
    assert anatomy.earned == {"verified lookup": 0, "verified calculation": 1}
    assert anatomy.parts == {"lookup": 0.15, "calculation": 0.25, "success": 0.6, "error": 0.0}
    assert anatomy.kind == SOLVED


def test_a_call_that_was_not_executed_and_thinking_that_never_closed_are_said(plan, policy_chat):
    once = replace(plan.config.rules, agent=replace(plan.config.rules.agent, max_tool_iterations=1))
    task = plan.splits["test"][0]
    rollout = Rollout(task, policy_chat, once)
    call = '<think>\n</think>\n\n<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
    for _ in range(2):
        rollout.add_turn([*policy_chat.encode(call), policy_chat.end_id])
    first, second = dissect(rollout.record(), task, Pieces(policy_chat), policy_chat, once, "here").turns
    calls = [block.called for turn in (first, second) for block in turn.blocks if block.called]
    assert [called.event and called.event.error for called in calls] == ["bad_arguments", None]
    assert calls[1].event is None
    rollout = Rollout(task, policy_chat, once)
    rollout.add_turn([*policy_chat.encode("<think>\nund weiter"), policy_chat.end_id])
    (turn,) = dissect(rollout.record(), task, Pieces(policy_chat), policy_chat, once, "here").turns
    assert (turn.readable, [block.kind for block in turn.blocks]) == (False, ["thinking"])


@given(tokens=st.lists(st.integers(0, 300), max_size=40), text=st.text(max_size=12))
def test_pieces_are_all_tokens_in_order(chat, tokens, text):
    ids = [*tokens, *chat.encode(text), *tokens]
    pieces = Pieces(chat).of(ids)
    assert [number for piece in pieces for number in piece.ids] == ids


def test_a_character_of_several_tokens_is_one_piece(chat):
    ids = chat.encode("x😀ß")
    assert len(ids) == 7
    assert [piece.text for piece in Pieces(chat).of(ids)] == ["x", "😀", "ß"]
    assert [len(piece.ids) for piece in Pieces(chat).of(ids[2:])] == [1, 1, 1, 2]  # the rest of one is bytes


# ---- what a policy says stays text


def test_a_page_runs_no_script_but_its_own(hostile):
    page = html(plan := load_run(hostile, check_inputs=False), transcripts(plan, Choice()))
    for mark in (b"<!--", b"<img", b"broken", b"\x1b", "\u202e".encode()):
        assert mark not in page
    scripts = re.findall(rb"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    assert [kind.split()[0] for kind, _ in scripts if kind] == [b'type="text/plain"'] * 2
    (own,) = [content for kind, content in scripts if not kind]
    policy = re.search(rb'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1].decode()
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(own).digest()).decode()}';" in policy
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    markup = rb"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|setHTML|createContextualFragment"
    assert not re.search(markup + rb"|eval|Function\(|setTimeout\(['\"]", own)
    assert not re.search(rb"(src|href)\s*=\s*[\"']?(https?:)?//|@import|url\(", page)


def test_a_browser_shows_it_as_text(hostile, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here to open the page with")
    plan = load_run(hostile, check_inputs=False)
    (tmp_path / "page.html").write_bytes(html(plan, transcripts(plan, Choice())))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    options.append(f"--user-data-dir={tmp_path / 'profile'}")
    page = f"file://{tmp_path / 'page.html'}#0"
    done = subprocess.run([browser, *options, "--dump-dom", page], capture_output=True, text=True, timeout=300)
    assert "<title>Transcripts of begun</title>" in done.stdout, done.stderr[-2000:]
    assert re.findall(r"<script[ >]", done.stdout) == ["<script>"]  # the data were taken out
    text = re.sub(r"<[^>]*>", "", done.stdout.partition("<article")[2].partition("</article>")[0])
    assert "&lt;/script&gt;&lt;script&gt;document.title='broken'" in text
    assert "<img" not in done.stdout


def test_nothing_acts_on_a_terminal(hostile):
    plan = load_run(hostile, check_inputs=False)
    text = "\n".join(lines(transcripts(plan, Choice()), coloured=False))
    assert r"\x1b]0;broken\x07\x1b[2J\u202e@SCRIPT@" in text
    assert all(char.isprintable() or char == "\n" for char in text)
    coloured = "\n".join(lines(transcripts(plan, Choice()), coloured=True))
    assert re.sub(r"\x1b\[[0-9]+m", "", coloured) == text != coloured


def test_invisible_characters_are_spelled_out():
    assert printable("a\u200b\x00\ud800\r\u2028ü\n\tb") == "a\\u200b\\x00\\ud800\\r\\u2028ü\n\tb"


# ---- the command


def test_the_command_writes_a_page_or_lines(hostile, tmp_path):
    page = tmp_path / "page.html"
    for arguments in (["--output", str(page)], ["--text"]):
        called = [sys.executable, "-m", "tools.transcripts", "--run", str(hostile), *arguments]
        done = subprocess.run(called, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("── baseline · test-000 · sample 0\n✗ no lookup")
    assert "no part of the summary" in done.stderr and "no part of the summary" in page.read_text()
    assert len(shown(page.read_bytes())[0]["rollouts"]) == 1


def test_what_cannot_be_done_is_one_line(hostile, tmp_path):
    there = tmp_path / "there.html"
    there.write_text("mine")
    assert "exists already" in refused("--run", hostile, "--output", there)
    assert there.read_text() == "mine"
    assert "has no task 'test-999'" in refused("--run", hostile, "--text", "--task", "test-999")
    assert "the plan is missing" in refused("--run", tmp_path / "nowhere", "--text")


@pytest.mark.parametrize(
    ("choice", "words"),
    [(Choice(("candidate",)), "so far it has rollouts of baseline"), (Choice(steps=(3,)), "no such rollouts"),
     (Choice(tasks=("test-001",)), "no rollout of test-001")],
)  # fmt: skip
def test_a_choice_of_nothing_is_refused(hostile, choice, words):
    with pytest.raises(Refused, match=words):
        list(transcripts(load_run(hostile, check_inputs=False), choice))


def test_a_run_without_rollouts_is_refused(begun, tmp_path):
    with pytest.raises(Refused, match="so far it has rollouts of no stage"):
        command.write(begun, Choice(), tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_page_does_not_lie_among_the_evidence(hostile):
    with pytest.raises(Refused, match="among the run's evidence"):
        command.write(hostile, Choice(), hostile / "baseline" / "page.html")
    command.write(hostile, Choice(), hostile / "page.html")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record["mask"].pop(), "mask does not say"),
        (lambda record: record["mask"].__setitem__(0, 0), r"spans\[0\] is not where"),
        (lambda record: record["spans"].append([1]), r"spans\[1\] is not where"),
        (lambda record: record["spans"].pop(), "mask marks tokens"),
        (lambda record: record["prompt_ids"].append(-1), "negative number"),
        (lambda record: record["events"][0].update(turn=9), "events names a turn"),
        (lambda record: record["outcome"].pop("hit_cap"), "outcome has not the entries"),
        (lambda record: record.update(task_id="train-000"), "not of the test split"),
    ],
)
def test_a_record_that_cannot_be_laid_out_is_refused_by_its_place(hostile, change, words):
    path = hostile / "baseline" / "rollouts.jsonl"
    record = json.loads(path.read_text())
    change(record)
    write_lines(path, [record])
    with pytest.raises(Refused, match=f"rollouts.jsonl: record 0: .*{words}"):
        list(transcripts(load_run(hostile, check_inputs=False), Choice()))


def test_ids_are_read_with_the_frozen_tokenizer_alone(hostile, practice, tmp_path):
    plan = load_run(hostile, check_inputs=False)
    gone = replace(plan.frozen.checkpoint, path=str(tmp_path / "gone"))
    moved = replace(plan, frozen=replace(plan.frozen, checkpoint=gone))
    with pytest.raises(Refused, match="no tokenizer"):
        list(transcripts(moved, Choice()))
    merged = Path(shutil.copytree(practice / "checkpoint", hostile / "merge" / "checkpoint"))
    assert len(list(transcripts(moved, Choice()))) == 1
    with open(merged / "tokenizer.json", "a") as file:
        file.write("\n")
    with pytest.raises(Refused, match="not the one that the plan froze"):
        list(transcripts(moved, Choice()))
