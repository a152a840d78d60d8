"""What an ONNX file asks the runtime for, read from its bytes without the `onnx` package.

An ONNX file is a protobuf message: fields, each a number, a kind and a value, messages inside messages. Of these the
ones that hold nodes and tensors are followed here. Refused is what `favour.export` never writes: weights in other files
(which a runtime would go and read), random numbers, loops and branches, functions, and operators outside the standard.
"""

from __future__ import annotations

from collections.abc import Iterator

from favour.errors import CorruptFile

_MODEL_GRAPH, _MODEL_FUNCTIONS, _MODEL_TRAINING = 7, 25, 20
_GRAPH_NODE, _GRAPH_TENSORS, _GRAPH_SPARSE = 1, 5, 15
_NODE_INPUT, _NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = 1, 4, 5, 7
_ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS, _ATTRIBUTE_SPARSE = (5, 10), (6, 11), (22, 23)
_TENSOR_ELSEWHERE, _TENSOR_PLACE = 13, 14
_STANDARD = (b"", b"ai.onnx")
_REFUSED = {
    *("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"),
    *("If", "Loop", "Scan", "SequenceMap"),
}
# The first input that an operator may go without, its name empty; a runtime that is not told better reads address 0.
_OPTIONAL = {"Clip": 1, "Resize": 1, "Pad": 2, "Slice": 3, "LSTM": 3, "GRU": 3, "RNN": 3}


def check_graph(content: bytes) -> None:
    """Raise `CorruptFile` for what `favour.export` does not write; other damage is the runtime's to find."""
    view = memoryview(content)
    for field, value in _fields(view):
        if field in (_MODEL_FUNCTIONS, _MODEL_TRAINING):
            raise CorruptFile("it defines functions of its own")
        if field == _MODEL_GRAPH:
            _check(_message(value))


def _check(graph: memoryview) -> None:
    for field, value in _fields(graph):
        if field == _GRAPH_NODE:
            _check_node(_message(value))
        elif field == _GRAPH_TENSORS:
            _check_tensor(_message(value))
        elif field == _GRAPH_SPARSE:
            raise CorruptFile("it holds sparse tensors")


def _check_node(node: memoryview) -> None:
    operator, inputs = "", []
    for field, value in _fields(node):
        if field == _NODE_OPERATOR:
            operator = bytes(_message(value)).decode("utf-8", "replace")
            if operator in _REFUSED:
                raise CorruptFile(f"its graph has the operator {operator}")
        if field == _NODE_INPUT:
            inputs.append(bytes(_message(value)))
        if field == _NODE_DOMAIN and bytes(_message(value)) not in _STANDARD:
            raise CorruptFile(f"its graph has an operator of {bytes(_message(value))[:60]!r}, outside the standard")
        if field == _NODE_ATTRIBUTE:
            for kind, inner in _fields(_message(value)):
                if kind in _ATTRIBUTE_GRAPHS or kind in _ATTRIBUTE_SPARSE:
                    raise CorruptFile("its graph has graphs or sparse tensors inside an operator")
                if kind in _ATTRIBUTE_TENSORS:
                    _check_tensor(_message(inner))
    if b"" in inputs[: _OPTIONAL.get(operator, len(inputs))]:
        raise CorruptFile(f"its graph has an operator {operator[:40]!r} without an input that it needs")


def _check_tensor(tensor: memoryview) -> None:
    for field, value in _fields(tensor):
        if field == _TENSOR_ELSEWHERE or (field == _TENSOR_PLACE and value != 0):
            raise CorruptFile("its weights lie in another file, which no checksum covers")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise CorruptFile("it is no sound ONNX file: a number stands where a part of the graph should")
    return value


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Numbers and values of the fields of a message; texts, bytes and messages as views."""
    place = 0
    while place < len(message):
        tag, place = _number(message, place)
        kind = tag & 7
        if kind == 0:
            value, place = _number(message, place)
            yield tag >> 3, value
            continue
        if kind == 2:
            length, place = _number(message, place)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise CorruptFile("it is no sound ONNX file: a field of no known kind")
        if place + length > len(message):
            raise CorruptFile("it is no sound ONNX file: it ends inside a field")
        yield tag >> 3, message[place : place + length]
        place += length


def _number(message: memoryview, place: int) -> tuple[int, int]:
    """A whole number of seven bits a byte, and the place behind it."""
    result = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            break
        byte = message[place]
        place += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, place
    raise CorruptFile("it is no sound ONNX file: it ends inside a number")
