"""Numbers of the host on a device."""

import numpy as np
import pytest
import torch

from refimpl.kernels.transfer import array_to_device

DEVICES = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, bool])
def test_an_array_comes_in_its_own_dtype_or_the_one_asked_for(device, dtype):
    array = np.arange(12).reshape(3, 4).astype(dtype)[:, ::2]
    own = array_to_device(array, device)
    assert own.dtype == torch.from_numpy(array).dtype
    assert own.cpu().tolist() == array.tolist()
    asked = array_to_device(array, device, torch.int64)
    assert asked.dtype == torch.int64
    assert asked.cpu().tolist() == array.astype(np.int64).tolist()
    assert asked.device.type == own.device.type == device.type
