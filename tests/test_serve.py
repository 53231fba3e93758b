"""The live view: what it lists, what it serves, and what it never does."""

import json
import os
import socket
import threading
from http.client import HTTPConnection
from pathlib import Path

import pytest

from plot_ot.errors import PlotError
from plot_ot.files.run_directory import RunDirectory
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
    (run / "manifest.json").write_text(
        json.dumps({"format": "plot-ot run 1", "config": config, "started": "2030", "versions": {}})
    )
    row = listed(server)["er"]
    assert (row["units"], row["expected"], row["state"], row["accuracy"]) == (0, 6, "interrupted", None)
    with RunDirectory.open(run, config, {}) as going:
        going.finish(1, "das", {"records": records(1, "das")})
        row = listed(server)["er"]
        assert (row["units"], row["best"], row["state"]) == (1, "das", "running")
    assert listed(server)["er"]["state"] == "interrupted"
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


# -- attacked (F2, F17) -----------------------------------------------------------------------------------------------

SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>fetch("/runs.json")</script></svg>'


def test_f02_everything_that_is_served_has_a_policy_and_a_strangers_svg_is_in_a_sandbox(served):
    server, folder = served
    (folder / "first" / "figures" / "evil.svg").write_bytes(SVG)
    for path in ("/", "/runs.json", "/run/first/", "/run/first/figures/handles.png", "/nothing"):
        headers = ask(server, path)[2]
        assert headers["Content-Security-Policy"], path
        assert headers["X-Content-Type-Options"] == "nosniff"
    status, body, headers = ask(server, "/run/first/figures/evil.svg")
    assert (status, body) == (200, SVG)
    policy = headers["Content-Security-Policy"].split("; ")
    assert "default-src 'none'" in policy
    assert "sandbox" in policy


def test_f02_links_out_of_a_run_are_not_followed(served):
    server, folder = served
    figures = folder / "first" / "figures"
    (figures / "secret.png").symlink_to(folder.parent / "secret.txt")
    assert ask(server, "/run/first/figures/secret.png")[0] == 404
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "secret.png").write_text("secret")
    other = text_run(folder / "other").path
    (other / "figures").symlink_to(elsewhere)
    assert ask(server, "/run/other/figures/secret.png")[0] == 404
    text_run(folder.parent / "outside")
    (folder / "linked").symlink_to(folder.parent / "outside")
    assert "linked" not in listed(server)
    assert "outside" not in listed(server)


def test_f02_a_request_that_never_arrives_is_let_go(served, monkeypatch):
    server, _ = served
    monkeypatch.setattr("plot_ot.report.serve.Handler.timeout", 0.2)
    with socket.create_connection(server.server_address, timeout=20) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        assert slow.recv(1000) == b""


def test_f17_one_odd_neighbour_does_not_take_the_others_down(served):
    server, folder = served
    (folder / "broken").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to(folder / "loop")
    for name, manifest in {
        "list": "[]",
        "numbers": '{"config": 7, "started": {}, "versions": []}',
        "types": '{"config": {"seeds": "x", "methods": {"a": 1}, "task": [1], "model": {}}}',
    }.items():
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text(manifest)
    (folder / "results").mkdir()
    (folder / "results" / "manifest.json").write_text("{}")
    (folder / "results" / "results.json").write_text(
        '{"task": {}, "records": [{"seed": 1, "method": "a", "accuracy": 1e999}]}'
    )
    odd = str(folder).encode() + b"/\xff\xfe"
    os.mkdir(odd)
    (Path(os.fsdecode(odd)) / "manifest.json").write_text("{}")
    (folder / "fifo").mkdir()
    os.mkfifo(folder / "fifo" / "manifest.json")
    rows = listed(server)
    assert {"first", "list", "numbers", "types", "results"} <= set(rows)
    assert rows["first"]["best"] == "plot-pca"
    assert ask(server, "/")[0] == 200
    for row in rows.values():
        assert ask(server, f"/run/{row['key']}/")[0] in (200, 404)


def test_f17_an_unreadable_folder_is_passed_over(served, monkeypatch):
    server, folder = served
    (folder / "closed").mkdir(mode=0)
    scan = os.scandir

    def denied(path):  # root may read anything
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    assert "first" in listed(server)
