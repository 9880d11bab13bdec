"""The driver waits for a master that is away, whatever that looks like, and for nothing that lasts."""

import http.server
import threading
import time

import pytest

from driving import NAMES, World, driven, fake_plan, submissions
from recipe.errors import Refused
from tools.driver import chain, patience, remote

WAITS = [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
TROUBLES = {
    "500": lambda faults, count, match: faults.fail_requests(count, 500, match),
    "502": lambda faults, count, match: faults.fail_requests(count, 502, match),
    "503": lambda faults, count, match: faults.fail_requests(count, 503, match),
    "504": lambda faults, count, match: faults.fail_requests(count, 504, match),
    "429": lambda faults, count, match: faults.fail_requests(count, 429, match),
    "a proxy's 503": lambda faults, count, match: faults.fail_requests(count, 503, match, page=True),
    "a proxy's page": lambda faults, count, match: faults.fail_requests(count, 200, match, page=True),
    "half a body": lambda faults, count, match: faults.cut_answers(count, match),
    "silence": lambda faults, count, match: faults.stay_silent(count, match),
}


@pytest.fixture(params=TROUBLES)
def trouble(request, monkeypatch):
    monkeypatch.setattr(patience, "TIMEOUT", (0.1, 0.1))
    return TROUBLES[request.param]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def master(double, said, waits) -> remote.Master:
    return remote.connect(say=said.append, sleep=waits.append)


def started(master, tmp_path) -> int:
    """An experiment that has ended and left a log line."""
    (tmp_path / "context").mkdir()
    wanted = chain.configuration("grpo", "p", "practice", tmp_path / "plan.json", "l")
    wanted |= {"entrypoint": "echo hello", "bind_mounts": []}
    wanted["resources"] = {**wanted["resources"], "resource_pool": "pool"}
    number = master.submit(wanted, tmp_path / "context", master.project("lab", "p"))
    while master.look(number).state not in remote.ENDED:
        time.sleep(0.1)
    return number


def test_every_way_to_be_away_is_waited_for_and_said_once(double, master, said, waits, trouble):
    trouble(double.faults, len(WAITS), "GET /api/v1/workspaces")
    start = time.monotonic()
    assert master.project("lab", "p")
    assert waits == WAITS and time.monotonic() - start < 10
    first, second = said
    assert first.startswith(f"{master.cluster.address} does not answer; asking again for 10 minutes (")
    assert second == f"{master.cluster.address} answers again"


@pytest.mark.parametrize("match", ["GET /info", "POST /api/v1/auth/login", "GET /api/v1/me"])
def test_logging_in_is_as_patient(double, master, said, waits, trouble, match):
    trouble(double.faults, 2, match)
    if match.endswith("login"):
        double.world.user_tokens.clear()
    assert remote.connect(say=said.append, sleep=waits.append).project("lab", "p")
    assert double.world.user_tokens and waits == [1.0, 2.0][: len(waits)] and not said
    # A token's answer is read by its status alone: a page or half an answer of 200 is as good.
    assert waits or match.endswith("me")


def test_every_question_goes_on_when_it_is_answered_again(double, master, waits, trouble, tmp_path):
    number = started(master, tmp_path)
    for question in (
        lambda: master.look(number),
        lambda: master.record(number),
        lambda: master.last_lines(number, 5),
        lambda: master.save_reports(number, tmp_path / "log", tmp_path / "metrics"),
        lambda: master.find(1, "grpo", "p", "l"),
        lambda: master.annotate(number, "notes"),
    ):
        trouble(double.faults, 1, "/api/v1/(experiments|trials)")
        before = len(waits)
        question()
        assert len(waits) == before + 1
    assert "hello" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("match", ["GET /api/v1/trials/1/logs", "GET /api/v1/trials/metrics"])
def test_a_stream_that_breaks_off_is_read_again_from_the_start(double, master, waits, tmp_path, match):
    number = started(master, tmp_path)
    double.faults.cut_answers(2, match)
    master.save_reports(number, tmp_path / "log", tmp_path / "metrics")
    assert (tmp_path / "log").read_text().count("|| hello\n") == 1
    master.record(number)
    assert waits == [1.0, 2.0]


def test_patience_ends_in_one_line(double, master, said, waits, trouble):
    trouble(double.faults, 100, "GET /api/v1/workspaces")
    with pytest.raises(Refused, match=r"gave no answer for 10 minutes \(last: .+\); an experiment goes on by itself") as end:
        master.project("lab", "p")
    assert "\n" not in str(end.value) and "<" not in str(end.value)
    assert 560 < sum(waits) <= patience.PATIENCE + 30 and len(said) == 1


@pytest.mark.parametrize(
    ("status", "line"),
    [(400, "answers: .*injected"), (401, "no valid login"), (403, "answers: Forbidden"), (404, "answers: injected")],
)
def test_what_lasts_is_said_at_once(double, master, waits, status, line):
    double.faults.fail_requests(1, status, match="GET /api/v1/workspaces")
    with pytest.raises(Refused, match=line):
        master.project("lab", "p")
    assert not waits


def test_a_proxy_that_knows_no_such_page_deletes_no_experiment(double, master, waits, tmp_path):
    number = started(master, tmp_path)
    double.faults.fail_requests(2, 404, match="GET /api/v1/experiments", page=True)
    assert master.look(number).state == "COMPLETED" and waits == [1.0, 2.0]
    assert master.look(99).state == "DELETED"
    master.annotate(99, "a page that is gone is no reason to stop")


def test_a_defect_is_no_absence(master, waits):
    with pytest.raises(KeyError):
        master._asked(lambda: {}["key"])
    with pytest.raises(TypeError):
        master._asked(lambda: master._client.get_experiment())
    assert not waits


def test_a_busy_master_does_not_log_anybody_out(double, master, monkeypatch):
    tokens = dict(double.world.user_tokens)
    double.faults.fail_requests(2, 503, match="GET /api/v1/me")
    remote.connect(say=lambda line: None, sleep=lambda seconds: None)
    assert double.world.user_tokens == tokens


def test_another_web_server_is_no_master(monkeypatch, waits):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        server.RequestHandlerClass.log_message = lambda *_: None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("DET_MASTER", f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(Refused, match="is no Determined master"):
            remote.connect(sleep=waits.append)
        server.shutdown()
    monkeypatch.setenv("DET_MASTER", "http://127.0.0.1:port")
    with pytest.raises(Refused, match="DET_MASTER is no address"):
        remote.connect(sleep=waits.append)
    assert not waits


# ---- a submission, which must not be made twice


@pytest.mark.parametrize("acted", [True, False])
def test_a_submission_whose_answer_got_lost_is_looked_for_first(double, master, waits, tmp_path, monkeypatch, acted):
    if acted:
        double.faults.cut_answers(1, "POST /api/v1/experiments$")
    else:
        double.faults.fail_requests(1, 503, "POST /api/v1/experiments$", page=True)
    wanted = chain.configuration("grpo", "p", "practice", tmp_path / "plan.json", "l")
    wanted["resources"] = {**wanted["resources"], "resource_pool": "pool"}
    project = master.project("lab", "p")
    assert master.submit({**wanted, "bind_mounts": []}, tmp_path, project) is None and not waits
    assert len(master.find(project, "grpo", str(tmp_path / "plan.json"), "l")) == acted


@pytest.mark.parametrize("acted", [True, False])
def test_the_chain_goes_on_after_a_lost_submission_and_submits_none_twice(tmp_path, acted):
    plan, world, said = fake_plan(tmp_path / "run"), World(latency=5.0 if acted else 0.0), []
    running = driven(plan, world, said)
    submit, losses = running._master.submit, []

    def lossy(configuration, context, project):
        if configuration["name"] == "merge" and not losses:
            losses.append(submit(configuration, context, project) if acted else None)
            return None
        return submit(configuration, context, project)

    running._master.submit = lossy
    running.run()
    assert submissions(world) == list(NAMES)
    assert "merge: the answer to the submission got lost; looking for its experiment" in said


def test_a_master_that_takes_no_submission_for_long_ends_in_one_line(tmp_path):
    running = driven(fake_plan(tmp_path / "run"), World())
    running._master.submit = lambda *_: None
    with pytest.raises(Refused, match="answers no submission of stage preflight"):
        running.run()


def test_a_rejected_submission_is_not_made_again(double, master, tmp_path):
    for status in (400, 409, 413):
        double.faults.fail_requests(1, status, "POST /api/v1/experiments$")
        with pytest.raises(Refused, match="stage grpo cannot be submitted: .*injected failure"):
            master.submit({"name": "grpo"}, tmp_path, 1)
    double.faults.fail_requests(1, 401, "POST /api/v1/experiments$")
    with pytest.raises(Refused, match="no valid login"):
        master.submit({"name": "grpo"}, tmp_path, 1)
