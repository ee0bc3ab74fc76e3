"""SIGTERM on several ranks: noted wherever it arrives, acted on by all ranks after the same step."""

from __future__ import annotations

import signal
import threading
from typing import Any

from lightning.pytorch import Trainer


class Termination:
    """Takes SIGTERM over from Lightning where a training has several ranks.

    Schedulers send it to every process, never at the same moment, or to one. Lightning's own handler broadcasts from
    within the signal handler, where another rank may be in any other collective (PL#20806). Here a rank only notes that
    it was asked; after each batch the ranks tell each other, and all of them stop where one was.
    """

    def __init__(self) -> None:
        self._asked = False

    def listen(self, trainer: Trainer) -> None:
        """Installs the handler, until Lightning puts back what was there before the training."""
        self._asked = False
        if trainer.world_size == 1 or threading.current_thread() is not threading.main_thread():
            return

        def note(number: int, frame: Any) -> None:
            launcher = trainer.strategy.launcher
            if not self._asked and launcher is not None:
                launcher.kill(number)  # the processes that this one started
            self._asked = True

        signal.signal(signal.SIGTERM, note)

    def agreed(self, trainer: Trainer) -> bool:
        """Tells every rank, after a batch, whether any was asked to stop; Lightning then raises SIGTERMException."""
        if trainer.world_size == 1 or not trainer.strategy.reduce_boolean_decision(self._asked, all=False):
            return False
        trainer._signal_connector.received_sigterm = True
        return True
