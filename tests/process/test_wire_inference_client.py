"""The typed client's requests: what is not set stays unset, what cannot be sent is named."""

import pytest

from protocol.errors import InvalidArgument
from protocol.wire.inference_client import GenerateCall


def test_unset_values_are_left_to_the_server():
    request = GenerateCall(text="x", temperature=0.0).to_wire()
    assert request.HasField("temperature") and not request.HasField("max_tokens")
    assert request.WhichOneof("input") == "text"


def test_set_values_are_sent():
    request = GenerateCall(
        text="x", n=2, min_p=0.0, logit_bias={5: -1.5}, stop_token_ids=[7], regex="a"
    ).to_wire()
    assert request.n == 2 and request.HasField("min_p") and not request.HasField("min_tokens")
    assert dict(request.logit_bias) == {5: -1.5} and list(request.stop_token_ids) == [7]
    assert request.structured_output.regex == "a"


@pytest.mark.parametrize("changes", [{"logit_bias": {-1: 0.0}}, {"stop_token_ids": [1 << 32]}])
def test_token_ids_that_the_wire_cannot_carry_are_refused(changes):
    with pytest.raises(InvalidArgument, match="token id"):
        GenerateCall(text="x", **changes).to_wire()


@pytest.mark.parametrize("field", ["max_tokens", "top_k", "seed", "n"])
def test_a_number_that_the_wire_cannot_carry_is_named(field):
    with pytest.raises(InvalidArgument, match=field) as refused:
        GenerateCall(text="x", **{field: 10**20}).to_wire()
    assert refused.value.field == field
