"""Traces are saved as text and loaded again, and other text is refused."""

import pickle

import pytest

from legoai.cost.trace.file import load, save
from legoai.cost.trace.records import (
    Allocate,
    Categorise,
    Collective,
    Copy,
    Free,
    HostWaitDevice,
    HostWaitEvent,
    HostWaitStream,
    Kernel,
    Mark,
    RecordEvent,
    Resize,
    TensorType,
    WaitEvent,
    WaitStream,
    WaitWork,
)
from legoai.cost.trace.segments import Instance, first_instance
from legoai.cost.trace.trace import Trace

WHERE = {"module": "layers.0", "phase": "forward"}
EVERY_RECORD = (
    Mark("step 1"),
    Kernel(
        stream=0, op="aten.mm", inputs=(TensorType((2, 3), "bfloat16"), TensorType((3, 4), "bfloat16")),
        outputs=(TensorType((2, 4), "bfloat16"),), flops=48, bytes_read=36, bytes_written=16,
        attributes={"causal": True}, **WHERE,
    ),
    Collective(work=1, stream=2, kind="all_gather", ranks=(0, 4), axis="dp_shard", bytes=64, dtype="float32", **WHERE),
    Copy(stream=0, direction="host_to_device", bytes=8, blocking=False, **WHERE),
    RecordEvent(1, 0), WaitEvent(2, 1), WaitStream(0, 2), WaitWork(0, 1), HostWaitEvent(1), HostWaitStream(0),
    HostWaitDevice(), Allocate(storage=7, bytes=512, stream=0, category="activation", **WHERE),
    Categorise(7, "gradient", "layers.0"), Resize(7, 0), Free(7),
)  # fmt: skip


def test_every_record_survives_serialisation():
    trace = Trace(rank=3, world=8, stage=1, items=EVERY_RECORD)
    assert load(save(trace)) == trace


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 2}', '{"format":1,"rank":0,"world":1,"stage":0}\n{"record":"X"}']
)
def test_invalid_trace_text_is_refused(text):
    with pytest.raises(ValueError, match=r"trace"):
        load(text)


def test_records_and_instances_survive_pickling():
    assert pickle.loads(pickle.dumps(EVERY_RECORD)) == EVERY_RECORD
    first = first_instance(EVERY_RECORD)
    one, other = pickle.loads(pickle.dumps([first, Instance(first.segment, ((9,), (), ()), (8,))]))
    assert tuple(one.records()) == EVERY_RECORD
    assert one.segment is other.segment
    assert (other.number(0), other.number(-2), other.translation) == (9, 8, None)
