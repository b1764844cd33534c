"""Router inputs and routing kept for fitting, against what llama.cpp's own evaluation callback sees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from spice_moe import Llama, trace
from spice_moe.errors import SpiceError
from spice_moe.shipped import tiny_model


@pytest.fixture
def llm():
    llm = Llama(
        str(tiny_model()), n_ctx=256, n_threads=2, logits_all=True, verbose=False
    )  # else the last layer sees one row
    yield llm
    llm.close()


def test_the_capture_is_what_the_evaluation_callback_sees(llm: Llama, tmp_path: Path) -> None:
    text = "The river ran past the mill, and the miller slept."
    trace.record(tiny_model(), [text], tmp_path / "t.npz", router_inputs=True)
    recorded = trace.load(tmp_path / "t.npz")
    core = llm.spice._core
    core.start_capture()
    llm.eval(llm.tokenize(text.encode(), add_bos=True))
    calls = core.take_capture()
    assert [layer for layer, *_ in calls] == recorded.layers.tolist()
    for number, (_, hidden, ids, gates, down) in enumerate(calls):
        np.testing.assert_array_equal(ids, recorded.ids[number])
        np.testing.assert_allclose(gates, recorded.weights[number].astype(np.float32), rtol=2e-3, atol=1e-4)
        assert down is None
        np.testing.assert_allclose(
            hidden, recorded.router_inputs[number].astype(np.float32), rtol=2e-3, atol=1e-4
        )


def test_nothing_is_kept_unless_asked(llm: Llama) -> None:
    llm.eval([1, 2, 3])
    assert llm.spice._core.take_capture() == []


def test_a_full_capture_says_so_and_goes_on(llm: Llama) -> None:
    core = llm.spice._core
    core.start_capture(limit=10_000)
    llm.eval(list(range(3, 40)))
    with pytest.raises(SpiceError, match="limit of 10000 bytes"):
        core.take_capture()
    llm.eval([5])
    assert core.take_capture()
    core.stop_capture()
    llm.eval([6])
    assert core.take_capture() == []
