"""The live view: what it lists, what it serves, and what it never does."""

import json
import socket
import threading
from http.client import HTTPConnection

import pytest

from plot_ot.errors import PlotError
from plot_ot.report.serve import Server
from report_runs import NASTY, records, text_run


@pytest.fixture
def served(tmp_path):
    text_run(tmp_path / "runs" / "first")
    (tmp_path / "runs" / "first" / "figures").mkdir()
    (tmp_path / "runs" / "first" / "figures" / "handles.png").write_bytes(b"\x89PNG")
    (tmp_path / "secret.txt").write_text("secret")
    with Server(tmp_path / "runs") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server, tmp_path / "runs"
        server.shutdown()
        thread.join()


def ask(server, path, method="GET", host=None):
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_address[1]}")
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


def listed(server):
    return {r["name"]: r for r in json.loads(ask(server, "/runs.json")[1])}


def test_the_index_lists_task_model_date_best_method_and_accuracy(served):
    server, folder = served
    row = listed(server)["first"]
    assert (row["task"], row["model"], row["best"], row["seeds"]) == ("mcqa", "tiny-lm", "plot-pca", 2)
    results = json.loads((folder / "first" / "results.json").read_text())
    hits = [r["accuracy"] for r in results["records"] if r["method"] == "plot-pca"]
    assert row["accuracy"] == pytest.approx(sum(hits) / len(hits))
    assert row["started"].startswith("20")
    status, body, headers = ask(server, "/")
    assert status == 200
    assert b"plot-pca" in body
    assert headers["Content-Type"].startswith("text/html")


def test_a_run_that_is_going_on_moves_on_and_a_new_one_appears(served):
    server, folder = served
    run = folder / "deep" / "er"
    run.mkdir(parents=True)
    config = {"task": "heq", "methods": ["plot", "das"], "seeds": [1, 2]}
    (run / "manifest.json").write_text(json.dumps({"format": "plot-ot run 1", "config": config, "started": "2030"}))
    row = listed(server)["er"]
    assert (row["units"], row["expected"], row["state"], row["accuracy"]) == (0, 6, "going on", None)
    (run / "units" / "seed-1").mkdir(parents=True)
    (run / "units" / "seed-1" / "das.json").write_text(json.dumps({"records": records(1, "das")}))
    row = listed(server)["er"]
    assert (row["units"], row["best"]) == (1, "das")
    assert b"The run is not finished" in ask(server, f"/run/{row['key']}/")[1]


def test_a_runs_page_and_figures_are_served(served):
    server, _ = served
    status, body, _ = ask(server, "/run/first/")
    assert status == 200
    assert b"Where do AnswerPointer and AnswerToken live?" in body
    assert ask(server, "/run/first/figures/handles.png")[1] == b"\x89PNG"
    assert ask(server, "/run/first/", "HEAD")[1] == b""


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/run/../secret.txt",
        "/run/..%2Fsecret.txt/",
        "/run/first/../../secret.txt",
        "/run/first/figures/..%2F..%2Fsecret.txt",
        "/run/first/figures/../results.json",
        "/run/first/results.json",
        "/run/first/figures/",
        "/run/%2e%2e/",
        "//etc/passwd",
        "/run/first",
        "/nothing",
    ],
)
def test_nothing_but_runs_and_their_figures_can_be_reached(served, path):
    status, body, _ = ask(served[0], path)
    assert status == 404
    assert b"secret" not in body


def test_only_this_machine_under_its_own_name_is_answered(served):
    server, _ = served
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/", host="evil.example")[0] == 403
    assert ask(server, "/", host=f"localhost:{server.server_address[1]}")[0] == 200
    assert ask(server, "/", "POST")[0] == 501


def test_a_damaged_run_is_listed_with_what_is_wrong(served):
    server, folder = served
    (folder / "first" / "results.json").write_text("{")
    assert "results.json cannot be read" in listed(server)["first"]["problem"]
    assert ask(server, "/run/first/")[0] == 200


def test_names_cannot_become_markup_in_the_index(served):
    server, folder = served
    (folder / "first" / "results.json").write_text(json.dumps({"task": NASTY, "records": records(1, "das")}))
    assert NASTY.encode() not in ask(server, "/")[1]


def test_a_port_in_use_and_a_missing_folder_are_said(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PlotError, match="Choose another with --port"):
            Server(tmp_path, taken.getsockname()[1])
    with pytest.raises(PlotError, match="There is no folder"):
        Server(tmp_path / "nowhere")
