"""What no real Valkey does: answers that are none, or too many. An error, and never the answer to another."""

import pytest

from kvcellar.tiers import EngineError
from tests.tiers.conformance import buffer
from tests.tiers.liar import Liar, cluster
from tests.tiers.remote import NAME


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param(b"*1\r\n:5\r\n", id="no array"),
        pytest.param(b"*1\r\n*3\r\n:0\r\n:1\r\n:5\r\n", id="no node"),
        pytest.param(b"*1\r\n*3\r\n$1\r\n0\r\n$1\r\n1\r\n*2\r\n$1\r\nh\r\n:1\r\n", id="slots in words"),
        pytest.param(cluster((0, 1 << 45, 1)), id="more slots than there are"),
        pytest.param(b"*1\r\n" * 5000, id="arrays in arrays"),
        pytest.param(b"*1\r\n$%d\r\n" % (1 << 63), id="a word without an end"),
    ],
)
def test_a_map_that_is_none_is_an_error(opened, slots):
    with Liar() as liar:
        liar.slots = slots
        with pytest.raises(EngineError, match=str(liar.port)):
            opened(liar.url)


@pytest.mark.parametrize("reply", [b"-MOVED 1\r\n", b"-MOVED 1 h\r\n", b"-ASK 1 h:x\r\n"])
def test_a_redirect_to_nowhere_is_an_error(opened, reply):
    with Liar() as liar:
        engine = opened(liar.url)
        liar.reply = lambda _: reply
        with pytest.raises(EngineError):
            engine.exist([NAME])
        with pytest.raises(EngineError):
            engine.read(NAME, buffer(1000))


def test_an_envelope_that_is_larger_than_it_can_be_is_an_error(opened):
    with Liar() as liar:
        engine = opened(liar.url)
        liar.reply = lambda _: b"$%d\r\n" % (1 << 62)
        with pytest.raises(EngineError, match="where few were due"):
            engine.delete([NAME])
