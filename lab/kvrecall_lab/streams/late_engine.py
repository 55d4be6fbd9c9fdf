"""The connector in a real engine on a CPU, whose copies are late: for its process alone, because
importing this changes what devices are."""

from __future__ import annotations

from kvrecall.engines.vllm import device as devices
from kvrecall.engines.vllm.connector.connector import RecallConnector

from .late import late_device


class LateConnector(RecallConnector):
    """The real connector."""


devices.FORMS["cpu"] = late_device
