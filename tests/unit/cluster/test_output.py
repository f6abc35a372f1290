"""What `ringfence nodes --json` prints is JSON, whatever Ray's threads print meanwhile."""

from __future__ import annotations

import sys
import threading
from typing import TextIO, cast

import pytest

from ringfence.cli.cluster import MainThreadOutput


def test_other_threads_print_to_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", cast("TextIO", MainThreadOutput(sys.stdout)))
    warns = threading.Thread(target=print, args=("(raylet) lagging",))
    warns.start()
    warns.join()
    print("[]", flush=True)

    assert ("[]\n", "(raylet) lagging\n") == capsys.readouterr()
