"""The losses of one training have the same bits over threads, processes, TCP, two levels and each MPI that is here, at
stages 0 to 3 and with replicas. losses.py prints them as a table, over Gloo too."""

import losses
import pytest


@pytest.mark.slow
def test_the_table_has_one_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert losses.main([transport for transport in losses.TRANSPORTS if transport != "gloo"]) == 0
    assert "all the same bits" in capsys.readouterr().out
