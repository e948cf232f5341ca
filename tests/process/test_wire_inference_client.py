"""The typed client's requests: what is not set stays unset, what cannot be sent is named."""

import pytest

from protocol.errors import InvalidArgument
from protocol.wire.inference_client import GenerateCall


def test_unset_values_are_left_to_the_server():
    request = GenerateCall(text="x", temperature=0.0).to_wire()
    assert request.HasField("temperature") and not request.HasField("max_tokens")
    assert request.WhichOneof("input") == "text"


@pytest.mark.parametrize("field", ["max_tokens", "top_k", "seed"])
def test_a_number_that_the_wire_cannot_carry_is_named(field):
    with pytest.raises(InvalidArgument, match=field) as refused:
        GenerateCall(text="x", **{field: 10**20}).to_wire()
    assert refused.value.field == field
