"""Files are replaced as a whole, whoever writes beside."""

import threading
from concurrent.futures import ThreadPoolExecutor

from deltatune.machine import atomic_files


def test_two_threads_may_write_one_file(tmp_path):
    path, both = tmp_path / "file", threading.Barrier(2)

    def write(text: str) -> None:
        def written(temporary):
            temporary.write_text(text)
            both.wait(60)

        atomic_files.replace_file(path, written)

    with ThreadPoolExecutor(2) as threads:
        for ended in [threads.submit(write, text) for text in ("one", "other")]:
            ended.result(60)
    assert path.read_text() in ("one", "other")
    assert list(tmp_path.iterdir()) == [path]
