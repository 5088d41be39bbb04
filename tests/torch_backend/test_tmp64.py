import os; os.environ["TRITON_INTERPRET"]="1"
import pytest, torch, sys
sys.path.insert(0, "/work/wt/delta")
import tests.torch_backend.test_delta_rule as T
from tests.torch_backend.test_delta_rule import *
from tests.torch_backend.kernels import where
ONE=[pytest.param(("cpu","float32"),id="f32"), pytest.param(("cpu","float16"),id="f16")]
@pytest.fixture(autouse=True)
def sixty_four(monkeypatch):
    for m in ("corrected", "delta_rule", "chunks"):
        monkeypatch.setattr(f"torch_backend.ops.scan.{m}.corrected_chunk", lambda *a: 64)
@pytest.mark.parametrize("where", ONE, indirect=True)
@pytest.mark.parametrize("shared",[1,2])
def test_one(where, shared):
    inputs = drawn(where, shared=shared)
    found, dout = run(where, inputs, packed_on(where))
    assert_within_budget(found, oracle(inputs, dout, "float64"), oracle(inputs, dout, working(where)), where.dtype)
