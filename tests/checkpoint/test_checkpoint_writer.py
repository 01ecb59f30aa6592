"""A step made by one process out of tensors, boxes and values that come one at a time."""

import pytest
import torch

from megalith.checkpoint import Extent, RunRecord, StepWriter, open_checkpoint
from megalith.errors import CheckpointError

RECORD = RunRecord(step=7, consumed_samples=0, config={})


def test_tensors_and_boxes_in_any_order_come_back_whole(tmp_path):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(12, 10, generator=generator)
    experts = torch.randn(4, 3, 6, generator=generator).bfloat16()
    with StepWriter(tmp_path, RECORD, parts=("model", "optimizer"), shard_bytes=200) as writer:
        writer.add("model", "wide", wide[6:, :4], (6, 0), wide.shape)
        for expert in (2, 0, 3, 1):
            writer.add(
                "model", "experts", experts[expert : expert + 1].clone(), (expert, 0, 0), experts.shape
            )
        writer.add("model", "wide", wide[:6], (0, 0), wide.shape)
        writer.add("model", "scalar", torch.tensor(3))
        writer.add("model", "wide", wide[6:, 4:], (6, 4), wide.shape)
        writer.add("model", "nothing", torch.empty(0, 5))
    assert writer.folder == tmp_path / "step_00000007"
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.manifest.files) > 2
    found = dict(checkpoint.tensors("model"))
    assert torch.equal(found["wide"], wide) and torch.equal(found["experts"], experts)
    assert found["scalar"].item() == 3 and found["nothing"].shape == (0, 5)
    assert list(checkpoint.tensors("optimizer")) == []
    part = checkpoint.read("model", "wide", Extent((4, 2), (5, 6)))
    assert torch.equal(part, wide[4:9, 2:8])


def left(tmp_path):
    return [path.name for path in tmp_path.iterdir()]


def test_an_error_in_the_block_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), StepWriter(tmp_path, RECORD, shard_bytes=1) as writer:
        writer.add("model", "a", torch.ones(4))
        raise ZeroDivisionError
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([((0,), 2), ((3,), 1)], r"model\.a: .* do not cover F32 \[4\] exactly once"),
        ([((0,), 3), ((2,), 2)], r"do not cover F32 \[4\] exactly once"),
        ([((2,), 3)], r"do not cover F32 \[4\] exactly once"),
    ],
    ids=["gap", "overlap", "outside"],
)
def test_boxes_that_do_not_cover_their_tensor_are_refused(tmp_path, boxes, words):
    with pytest.raises(CheckpointError, match=words), StepWriter(tmp_path, RECORD) as writer:
        for offset, size in boxes:
            writer.add("model", "a", torch.ones(size), offset, (4,))
    assert left(tmp_path) == []


def test_one_name_has_one_type_and_shape(tmp_path):
    with (
        pytest.raises(CheckpointError, match=r"a was added as F32 \[4\] and as F16 \[4\]"),
        StepWriter(tmp_path, RECORD) as writer,
    ):
        writer.add("model", "a", torch.ones(2), (0,), (4,))
        writer.add("model", "a", torch.ones(2).half(), (2,), (4,))
    assert left(tmp_path) == []
