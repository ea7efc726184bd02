"""Records and instances of segments survive pickling."""

import pickle

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


def test_records_and_instances_survive_pickling():
    assert pickle.loads(pickle.dumps(EVERY_RECORD)) == EVERY_RECORD
    first = first_instance(EVERY_RECORD)
    one, other = pickle.loads(pickle.dumps([first, Instance(first.segment, ((9,), (), ()), (8,))]))
    assert tuple(one.records()) == EVERY_RECORD
    assert one.segment is other.segment
    assert (other.number(0), other.number(-2), other.translation) == (9, 8, None)
