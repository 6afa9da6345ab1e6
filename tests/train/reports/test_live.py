"""The live page: who gets it, what it shows while a run goes on, and that it ends with the run."""

import http.client
import io
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from console import SCRIPT, deltatune, started
from deltatune.errors import UserError
from deltatune.options.config import TrainConfig
from deltatune.train.reports import live
from deltatune.train.reports.live import LivePage, trains
from deltatune.train.reports.report import RunDescription, described, write_report

RESULT = {"iterations": 20, "train_loss": 1.0, "val_loss": None, "seconds": 1.0, "tokens_per_second": 1.0}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)


ELSEWHERE = ["metrics.jsonl", "report.html", "secret.txt", "x/", "data/", "..", "../secret.txt", "%2e%2e/secret.txt"]
ELSEWHERE += ["../../etc/passwd", "data/../secret.txt", "\\..\\secret.txt"]


def record(iteration):
    return {
        "iteration": iteration,
        "train_loss": 5 / iteration,
        "grad_norm": 2.0,
        "iterations_per_second": 2.0,
        "peak_memory": 1.25,
        "z_loss": 100 / iteration**2,
    }


@pytest.fixture
def folder(tmp_path):
    lines = [record(n) for n in range(1, 21)]
    lines += [{"iteration": 20, "val_loss": 0.75, "val_time": 1.0}]
    lines += [{"iteration": 20, "samples": [{"prompt": "<b>two</b>", "answer": "<img src=x onerror=alert(1)>"}]}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "secret.txt").write_text("secret")
    config = TrainConfig(model="some/model", iters=50)
    about = {"model": "some/model; 2 layers", "data": '"quoted" & <data>'}
    result = RESULT | {"peak_memory": 1}
    write_report(tmp_path / "report.html", tmp_path / "metrics.jsonl", config, result, RunDescription(about))
    return tmp_path


@pytest.fixture
def page(folder, monkeypatch):
    monkeypatch.setattr(live, "_WAIT", 0.0)
    with LivePage(folder, lambda: True) as page:
        yield page


def ask(address, path="", host=None, method="GET"):
    """The status, the headers and the content of an answer; `path` is taken as it is, dots and all."""
    split = urlsplit(address)
    connection = http.client.HTTPConnection(split.hostname, split.port, timeout=10)
    connection.putrequest(method, (path if path.startswith("/") else split.path + path), skip_host=True)
    if host != "":
        connection.putheader("Host", host or split.netloc)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def data(page, mark=""):
    status, _, content = ask(page.address, f"data?mark={mark}")
    assert status == 200
    return json.loads(content)


def test_the_page_and_its_data_are_there_and_nothing_else(page):
    status, headers, content = ask(page.address)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"{{" not in content
    assert not re.search(rb"(?:src|href)=|https?://(?!www\.w3\.org/2000/svg)", content)
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    nonce = re.search(r"nonce-([\w-]+)'", headers["Content-Security-Policy"])[1]
    assert f'<script nonce="{nonce}">'.encode() in content
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers
    for path in ELSEWHERE:
        status, _, content = ask(page.address, path)
        assert (status, b"secret" in content) == (404, False), path


@pytest.mark.parametrize(
    "path", ["/", "/data", "/wrong/", "/wrong/data", "/secret.txt", "//secret.txt", "/../secret.txt", "/%C3%A9/", "/[/"]
)
def test_without_the_token_everything_is_refused(page, path):
    status, _, content = ask(page.address, path)
    assert (status, b"secret" in content) == (403, False)


def test_part_of_the_token_is_not_the_token(page):
    token = urlsplit(page.address).path.strip("/")
    assert len(token) >= 22
    for wrong in (token[:-1], token + "x", token.swapcase(), ""):
        assert ask(page.address, f"/{wrong}/")[0] == 403
    assert ask(page.address, f"/{token}")[0] == 404


def test_another_host_is_refused_so_that_no_web_site_reads_it(page):
    port = urlsplit(page.address).port
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1.evil.example:{port}",
        "127.0.0.1:1",
        "",
    ):
        assert ask(page.address, host=host)[0] == 403, host
    assert ask(page.address, host=f"localhost:{port}")[0] == 200


def test_nothing_but_reading_is_answered(page):
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(page.address, method=method)[0] == 501


def test_it_listens_on_this_machine_alone(page):
    assert page._server.server_address[0] == "127.0.0.1"


def test_a_page_gets_what_it_does_not_have_yet(page, folder):
    first = data(page)
    assert len(first["records"]) == 22
    assert (first["reset"], first["running"], first["iterations"]) == (True, True, 50)
    assert first["about"] == {"model": "some/model; 2 layers", "data": '"quoted" & <data>'}
    again = data(page, first["mark"])
    assert (again["records"], again["reset"], again["mark"]) == ([], False, first["mark"])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(21)) + "\nnonsense\n" + json.dumps(record(22)) + "\n" + '{"iteration": 23, "tra')
    more = data(page, again["mark"])
    assert [each["iteration"] for each in more["records"]] == [21, 22]
    assert data(page, more["mark"])["records"] == []


@pytest.mark.parametrize("mark", ["", "x", "-1", "9" * 30, "5-00000000", "%00", "1e3-1"])
def test_a_mark_of_something_else_gives_everything(page, mark):
    found = data(page, mark)
    assert (len(found["records"]), found["reset"]) == (22, True)


def test_what_a_page_has_is_not_read_again(page, folder, monkeypatch):
    mark, path, sizes, opened = page.data("")["mark"], folder / "metrics.jsonl", [], Path.open

    class Counted(io.FileIO):
        def read(self, size=-1):
            sizes.append(size if size >= 0 else len(content := super().read()))
            return super().read(size) if size >= 0 else content

    line = json.dumps(record(21)) + "\n"
    with path.open("a") as file:
        file.write(line)
    monkeypatch.setattr(
        Path, "open", lambda at, *mode, **more: Counted(at) if at == path else opened(at, *mode, **more)
    )
    assert len(page.data(mark)["records"]) == 1
    assert 0 < sum(sizes) <= len(line) + live._MARKED < path.stat().st_size


def test_a_run_that_went_back_is_told_from_its_start(page, folder):
    """A continued run cuts its metrics, and writes others from there on, as many bytes or more."""
    mark = data(page)["mark"]
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(record(n) | {"train_loss": 9.0}) + "\n" for n in range(1, 60)))
    found = data(page, mark)
    assert (len(found["records"]), found["reset"]) == (59, True)


def test_a_run_without_files_yet_has_an_empty_page(tmp_path):
    with LivePage(tmp_path, lambda: True) as page:
        found = page.data("")
    assert (found["records"], found["iterations"], found["about"]) == ([], 0, {})


@pytest.mark.bad_input("a port that is taken")
def test_a_port_that_is_taken_is_named(page, folder):
    port = urlsplit(page.address).port
    with pytest.raises(UserError, match=rf"--port {port}: "), LivePage(folder, lambda: True, port):
        pass


def test_the_last_figures_reach_a_page_that_is_open(folder, monkeypatch):
    """The page is told that the run has ended before the server goes."""
    found = []
    with LivePage(folder, lambda: True) as page:
        page.data("")
        monkeypatch.setattr(page._told_end, "wait", lambda seconds: found.append((seconds, page.data("")["running"])))
    assert found == [(live._WAIT, False)]
    with pytest.raises(ConnectionRefusedError):
        ask(page.address)


def test_whether_a_run_goes_on_is_read_from_its_lock(tmp_path):
    lock = tmp_path / "state" / "lock"
    assert not trains(tmp_path)
    lock.parent.mkdir()
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = os.uname().nodename
    for content, expected in (
        ({"process": os.getpid(), "machine": here}, True),
        ({"process": ended.pid, "machine": here}, False),
        ({"process": 1, "machine": "another"}, True),
        ({"process": "x"}, False),
        ([], False),
    ):
        lock.write_text(json.dumps(content))
        assert trains(tmp_path) == expected, content


def test_a_report_of_another_kind_describes_nothing(tmp_path):
    assert described(tmp_path / "none.html") == {}
    (tmp_path / "other.html").write_text('<meta name=run content="[1"><p>other')
    assert described(tmp_path / "other.html") == {}


def address_of(process):
    for line in process.stdout:
        if found := re.match(r"Live: (http://127\.0\.0\.1:\d+/[\w-]+/)\n", line):
            return found[1]
    raise AssertionError(process.stderr.read())


def test_train_serves_the_run_and_the_page_dies_with_it(checkpoint, tmp_path):
    (tmp_path / "train.jsonl").write_text((json.dumps({"prompt": "a", "completion": "b"}) + "\n") * 4)
    flags = ["--data", ".", "--adapter-path", "out", "--iters", "100000", "--save-every", "100000"]
    flags += ["--steps-per-report", "1", "--serve"]
    with started([SCRIPT, "train", "--model", checkpoint, *flags], cwd=tmp_path) as process:
        address = address_of(process)
        for line in process.stdout:
            if "Iter 2/" in line:
                break
        report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        assert "0 of 100,000 iterations of 4 rows; just begun" in report
        found = json.loads(ask(address, "data")[2])
        assert (found["running"], found["iterations"]) == (True, 100_000)
        assert found["records"][1]["iteration"] == 2
        assert found["about"]["model"].startswith(str(checkpoint))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 2
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=10)
    assert re.search(
        r"[\d,]+ of 100,000 iterations of 4 rows; stopped", (tmp_path / "out" / "report.html").read_text("utf-8")
    )


def test_watch_serves_a_folder_until_ctrl_c(folder):
    # In the background of a script, the tests inherit that Ctrl-C is ignored.
    obeyed = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with started([SCRIPT, "watch", folder], **obeyed) as process:
        found = json.loads(ask(address_of(process), "data")[2])
        assert (len(found["records"]), found["running"]) == (22, False)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


@pytest.mark.bad_input("`watch` of a folder without a run, or with a port that is none")
def test_watch_refuses_what_is_no_run(tmp_path):
    for arguments, message in (
        ([tmp_path], "holds no run"),
        ([tmp_path, "--port", 99999], "expected a port from 0 to"),
    ):
        done = deltatune("watch", *arguments)
        assert done.returncode == 2
        assert message in done.stderr


# Puts the pointer on the first curve, presses its button, and writes what is there.
SCRIPT_IN_PAGE = """
setTimeout(() => {
  const chart = document.querySelector("svg"), box = chart.getBoundingClientRect();
  chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 75, clientY: box.top + 60}));
  const under = document.querySelector(".read").textContent;
  chart.dispatchEvent(new PointerEvent("pointerleave", {}));
  const pressed = [...document.querySelectorAll("figure button")].map(x => x.getAttribute("aria-pressed"));
  const plain = chart.querySelector("polyline").getAttribute("points");
  document.querySelector("figure button").click();
  const log = chart.querySelector("polyline").getAttribute("points");
  const wide = [...document.querySelectorAll("body *")].filter(x => x.scrollWidth > x.clientWidth + 1 && x.clientWidth);
  parent.postMessage(JSON.stringify({
    width: document.documentElement.scrollWidth, inner: innerWidth, wide: wide.map(x => x.outerHTML.slice(0, 80)),
    titles: [...document.querySelectorAll("figcaption span")].map(x => x.textContent), under, pressed,
    moved: plain !== log,
    labels: [...chart.querySelectorAll("text")].map(x => x.textContent), dots: chart.querySelectorAll("circle").length,
    cards: [...document.querySelectorAll(".card")].map(x => x.innerText.replace("\\n", " ")),
    sample: document.querySelector(".sample").innerText, images: document.images.length,
    state: document.getElementById("state").textContent}), "*");
}, 1500);
"""
# No window is narrower than 500 pixels, so a frame gives the page its width.
FRAME = """<script>onmessage = event => document.title = event.data</script>
<iframe src="{address}" style="border:0;width:{width}px;height:3000px"></iframe>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_draws_it_at_any_width(page, tmp_path, width, monkeypatch):
    """The page gets a script that reads it, since another page may not look into it."""
    text = live._PAGE.read_text(encoding="utf-8")
    own = tmp_path / "own.html"
    own.write_text(text.replace("forever();\n</script>", f"forever();{SCRIPT_IN_PAGE}</script>"), encoding="utf-8")
    monkeypatch.setattr(live, "_PAGE", own)
    monkeypatch.delitem(live._HEADERS, "X-Frame-Options")
    plain, frame = live._Handler._page, FRAME.format(address=page.address, width=width).encode()

    def framed(self):
        self._answer(200, "text/html", frame) if self.path.endswith("?frame") else plain(self)

    monkeypatch.setattr(live._Handler, "_page", framed)
    # A browser in a container has no sandbox of its own.
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,3000"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run([BROWSER, *flags, f"{page.address}?frame"], capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert found, done.stdout[-3000:] + done.stderr[-2000:]
    seen = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert (seen["inner"], seen["width"], seen["wide"]) == (width, width, [])
    assert seen["titles"] == [
        *("Loss per token", "Gradient norm, before clipping", "Peak memory, GB", "z-loss of the routers"),
    ]
    # The last falls four hundredfold, which a linear axis would not show.
    assert seen["pressed"] == ["false", "false", "false", "true"]
    assert re.fullmatch(r"training [\d.]+ at iteration \d+ · validation 0\.75 at iteration 20", seen["under"])
    assert seen["moved"]
    assert {"0", "20", "iteration", "training", "validation"} <= set(seen["labels"])
    assert seen["dots"] == 1
    assert {"20 of 50 iterations", "0.2500 training loss", "0.7500 validation loss", "0:15 time left"} <= set(
        seen["cards"]
    )
    assert "<img src=x onerror=alert(1)>" in seen["sample"]
    assert (seen["images"], seen["state"]) == (0, "training")
