"""What is written to a table that lives on a device."""

import torch

from refimpl.executor.table import Table


def test_what_was_written_is_there_once_it_is_sent():
    table = Table(3, 4, torch.int32, torch.device("cpu"))
    address = table.on_device.data_ptr()
    table.write(1, 1, (5, 6))
    table.write(2, 3, (7,))
    assert not table.on_device.any()
    table.send()
    assert table.on_device.tolist() == [[0, 0, 0, 0], [0, 5, 6, 0], [0, 0, 0, 7]]
    table.write(0, 0, (1,))
    table.send()
    assert table.on_device.tolist() == [[1, 0, 0, 0], [0, 5, 6, 0], [0, 0, 0, 7]]
    assert table.on_device.data_ptr() == address, "a CUDA graph reads it there"


def test_what_is_sent_later_replaces_what_was_sent():
    table = Table(2, 4, torch.int64, torch.device("cpu"))
    table.write(1, 0, (1, 2, 3))
    table.send()
    table.write(1, 2, (9,))
    table.send()
    assert table.on_device.tolist() == [[0, 0, 0, 0], [1, 2, 9, 0]]
