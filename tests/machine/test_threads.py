"""Tests the number of BLAS threads: the share of the cores (machine, container, launcher) and the trial."""

import json

import pytest

from deltatune.machine import environment, threads
from deltatune.machine.threads import Threads, choose, quota, ranks_here, share


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    """Pretend to be on a machine of eight cores without container, launcher or forced number."""
    for name in (environment.THREADS, "MLX_HOSTFILE", "MLX_RANK", *threads._MPI_RANKS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "cores", lambda: 8)
    monkeypatch.setattr(threads, "quota", lambda: None)


def idle(number: int) -> float:
    """Return the seconds of a product that `number` threads share evenly."""
    return 0.04 / number


def test_an_idle_machine_gives_all_its_cores():
    assert choose(idle) == Threads(8, "one for each of 8 cores")


def test_two_threads_a_core_are_not_used_where_they_gain_nothing():
    assert choose(lambda number: idle(min(number, 4))).number == 4


@pytest.mark.parametrize("stalled", [1.0, 30.0])
def test_busy_cores_leave_one_thread(stalled):
    """Threads that wait for busy cores are slower than one thread, as was measured."""
    chosen = choose(lambda number: 0.01 * (1 + stalled * (number > 1)))
    assert chosen.number == 1
    assert "busy" in chosen.why
    assert environment.THREADS in chosen.why


def test_a_rare_stall_counts(monkeypatch):
    """One product in four waits for a time slice. The fastest product, or the median, would hide it."""
    monkeypatch.setattr(environment, "cores", lambda: 2)
    calls = iter(range(1000))
    chosen = choose(lambda number: idle(number) + (0.1 if number == 2 and next(calls) % 4 == 3 else 0.0))
    assert chosen.number == 1


def test_forced_number_of_threads_is_not_tried(monkeypatch):
    monkeypatch.setenv(environment.THREADS, "3")
    assert str(choose(lambda number: pytest.fail("tried"))) == "3 threads (DELTATUNE_THREADS=3)"


def ring(monkeypatch, tmp_path, ranks: list[list[str]], rank: int) -> None:
    (tmp_path / "hosts").write_text(json.dumps(ranks))
    monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts"))
    monkeypatch.setenv("MLX_RANK", str(rank))


@pytest.mark.parametrize(("rank", "number"), [(0, 4), (1, 4), (2, 8)])
def test_the_ranks_of_one_host_share_its_cores(monkeypatch, tmp_path, rank, number):
    ring(monkeypatch, tmp_path, [["10.0.0.1:5000"], ["10.0.0.1:5001", "10.1.0.1:5002"], ["10.0.0.2:5003"]], rank)
    assert share().number == number
    assert ("shared by 2 ranks" in share().why) == (number == 4)


def test_more_ranks_than_cores_get_a_thread_each(monkeypatch, tmp_path):
    ring(monkeypatch, tmp_path, [[f"127.0.0.1:{port}"] for port in range(11)], 10)
    assert share() == Threads(1, "one for each of 8 cores, shared by 11 ranks")


@pytest.mark.parametrize("text", ["", "{", "[]", "[[1]]", '{"a": 1}'])
def test_a_host_file_that_cannot_be_read_is_left_to_mlx(monkeypatch, tmp_path, text):
    ring(monkeypatch, tmp_path, [], 0)
    (tmp_path / "hosts").write_text(text)
    assert ranks_here() == 1


@pytest.mark.parametrize("name", threads._MPI_RANKS)
def test_mpirun_says_how_many_ranks_are_here(monkeypatch, name):
    monkeypatch.setenv(name, "4")
    assert share().number == 2


@pytest.mark.parametrize(("granted", "number"), [(2.5, 2), (0.5, 1), (8.0, 8), (16.0, 8), (None, 8)])
def test_a_containers_quota_is_kept(monkeypatch, granted, number):
    monkeypatch.setattr(threads, "quota", lambda: granted)
    assert share().number == number
    assert ("quota" in share().why) == (number < 8)


def groups(tmp_path, text: str, files: dict[str, str]) -> float | None:
    own = tmp_path / "own"
    own.write_text(text)
    for name, content in files.items():
        file = tmp_path / "sys" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return quota(tmp_path / "sys", own)


def test_the_least_quota_around_a_process_counts(tmp_path):
    files = {"cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "400000 100000"}
    assert groups(tmp_path, "0::/a/b\n", files) == 1.5


def test_the_first_version_of_control_groups(tmp_path):
    files = {
        "cpu/a/cpu.cfs_quota_us": "250000",
        "cpu/a/cpu.cfs_period_us": "100000",
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
    }
    assert groups(tmp_path, "4:memory:/x\n2:cpu,cpuacct:/a\n1:name=systemd:/\n0::/\n", files) == 2.5


def test_no_control_groups(tmp_path):
    assert groups(tmp_path, "0::/a\n", {}) is None
    assert quota(tmp_path, tmp_path / "missing") is None
