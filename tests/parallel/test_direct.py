"""What is told where GPUs share no memory; the collectives themselves are tested on GPUs."""

from unittest import mock

import pytest

from megalith import direct
from megalith.errors import TrainingError


def test_gpus_that_share_no_memory_are_told_with_the_way_out():
    failing = mock.Mock(side_effect=RuntimeError("no peer access"))
    with (
        mock.patch.object(direct.torch.cuda, "current_device", return_value=1),
        mock.patch.multiple(direct.symmetric, empty=mock.Mock(), rendezvous=failing),
        pytest.raises(TrainingError) as raised,
    ):
        direct.Slot(2048, "tp")
    said = str(raised.value)
    assert said.startswith(
        "cuda:1 cannot share 2,048 bytes with the other ranks of its axis (no peer access); "
    )
    assert "parallel.symmetric_memory_groups" in said and "leave the axis out of it" in said
