"""The inputs of steps: where they lie, two host buffers, tables as wide as what is in use."""

import pytest
import torch

from engine.asked.request import Request, Sequence
from engine.device.cpu import CPUDevice
from engine.errors import EngineError
from engine.run.inputs import StepInputs, Upload


def make_sequence(seq_id, blocks):
    sequence = Sequence(seq_id=seq_id, request=Request(request_id="r", prompt_token_ids=[1]))
    sequence.block_tables = [blocks]
    return sequence


def make_inputs():
    return StepInputs(CPUDevice(), tokens=40, rows=8, width=6)


def write(inputs, values):
    inputs.begin(len(values), len(values))
    for field, shift in ((inputs.ids, 0), (inputs.positions, 10), (inputs.slots[0], 20)):
        field.host[:] = [value + shift for value in values]
    inputs.lens.host[:] = [value + 30 for value in values]


def test_fields_arrive():
    inputs = make_inputs()
    write(inputs, [1, 2, 3])
    starts = inputs.add([7, 8], torch.int32)
    nothing = inputs.add([], torch.int64)
    inputs.send(None)
    assert inputs.ids.device.tolist() == [1, 2, 3]
    assert inputs.positions.device.tolist() == [11, 12, 13]
    assert inputs.slots[0].device.tolist() == [21, 22, 23]
    assert inputs.lens.device.tolist() == [31, 32, 33]
    assert (starts.tolist(), nothing.tolist()) == ([7, 8], [])
    assert inputs.ids.device.dtype == torch.int64
    assert inputs.lens.device.dtype == starts.dtype == torch.int32


def test_the_largest_step_fits():
    inputs = make_inputs()
    inputs.begin(40, 8)
    for row in range(8):
        inputs.set_table(row, make_sequence(row, list(range(6))))
        inputs.set_unknown(row, row)
    inputs.add(range(9), torch.int32)
    inputs.add(range(8), torch.int64)
    inputs.send(torch.arange(8))
    assert inputs.tables[0].tolist() == [list(range(6))] * 8
    assert inputs.ids.device[:8].tolist() == list(range(8))


@pytest.mark.parametrize("num_groups", [2, 3, 5])
def test_the_largest_step_of_several_groups_fits(num_groups):
    inputs = StepInputs(CPUDevice(), tokens=40, rows=8, width=6, num_groups=num_groups)
    inputs.begin(40, 8)
    for group, slots in enumerate(inputs.slots):
        slots.host[:] = range(group, group + 40)
    for row in range(8):
        sequence = make_sequence(row, list(range(6)))
        some = [[-1, -1, 9, 8, 7, group] for group in range(1, num_groups)]
        sequence.block_tables += some
        inputs.set_table(row, sequence)
        inputs.set_unknown(row, row)
    inputs.add(range(9), torch.int32)
    inputs.add(range(8), torch.int64)
    inputs.send(torch.arange(8))
    tables = [table.tolist() for table in inputs.tables]
    assert tables == [[blocks] * 8 for blocks in [list(range(6)), *some]]
    for group, slots in enumerate(inputs.slots):
        assert slots.device.tolist() == list(range(group, group + 40))


def test_steps_of_one_size_have_one_place_on_the_device_and_two_on_the_host():
    inputs = make_inputs()
    device, host = [], []
    for _ in range(3):
        write(inputs, [1, 2, 3])
        fields = inputs.ids, inputs.positions, *inputs.slots, inputs.lens
        device.append([field.device.data_ptr() for field in fields])
        host.append([field.host.ctypes.data for field in fields])
        assert all(address % 16 == 0 for address in device[-1])
        inputs.send(None)
    assert device[0] == device[1] == device[2]
    assert host[0] == host[2]
    assert not set(host[0]) & set(host[1])


def test_only_rows_and_columns_in_use_are_sent(monkeypatch):
    sent = []
    run = Upload.run
    monkeypatch.setattr(Upload, "run", lambda self: (sent.append(self), run(self)))
    inputs = make_inputs()
    write(inputs, [1, 2, 3])
    inputs.set_table(0, make_sequence(0, [5]))
    inputs.set_table(1, make_sequence(1, [4, 3]))
    inputs.send(None)
    assert tuple(sent[0].tables[0][0].shape) == (2, 2)
    assert inputs.tables[0][:2, :2].tolist() == [[5, 0], [4, 3]]
    bare = make_inputs()
    write(bare, [1, 2, 3])
    bare.send(None)
    assert sent[0].host.numel() - sent[1].host.numel() == 64
    assert sent[0].host.numel() < 64 * 6


def test_table_rows_follow_their_sequences():
    inputs = make_inputs()
    first, second = make_sequence(0, [1, 2]), make_sequence(1, [3])

    def send(*sequences):
        write(inputs, [1] * len(sequences))
        for row, sequence in enumerate(sequences):
            inputs.set_table(row, sequence)
        inputs.send(None)
        return [inputs.tables[0][i, : len(s.block_table)].tolist() for i, s in enumerate(sequences)]

    assert send(first, second) == [[1, 2], [3]]
    second.block_table.append(4)
    assert send(first, second) == [[1, 2], [3, 4]]
    assert send(second, first) == [[3, 4], [1, 2]]
    second.block_tables = [[9, 8, 7]]
    second.table_version += 1
    assert send(second) == [[9, 8, 7]]


def test_unknown_ids_are_read_from_the_tokens_of_the_step_before():
    inputs = make_inputs()
    write(inputs, [1, 2, 3, 4])
    inputs.set_unknown(3, 0)
    inputs.set_unknown(1, 2)
    inputs.send(torch.tensor([70, 71, 72]))
    assert inputs.ids.device.tolist() == [1, 72, 3, 70]
    write(inputs, [1, 2])
    inputs.send(torch.tensor([70, 71, 72]))
    assert inputs.ids.device.tolist() == [1, 2]
    write(inputs, [1, 2])
    inputs.set_unknown(0, 0)
    with pytest.raises(EngineError, match="got none for 1 rows"):
        inputs.send(None)
