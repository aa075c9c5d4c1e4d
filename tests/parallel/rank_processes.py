"""Whether the processes of ranks live, and what they leave behind."""

PATIENCE = 240.0
"""Seconds after which a test gives up, on a machine that does much else."""


def is_alive(process_id):
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_nothing_is_left(watch):
    watch._thread.join(PATIENCE)
    assert not watch._thread.is_alive()
    assert watch.process_ids
    assert not any(map(is_alive, watch.process_ids))
    assert not watch._processes.folder.exists()
