"""A double of the module `pynvml`. Its answers were written from the documentation of NVIDIA, not recorded on a GPU."""
# ruff: noqa: N802 - the real module's names

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

RECORDING = Path(__file__).with_name("recorded_nvml.json")


class RecordedNvml:
    """Returns the recorded answers of `pynvml`, or errors by their name in NVML, in order, and then the last one."""

    def __init__(
        self, recording: Path = RECORDING, *, changes: Mapping[str, Mapping[str, list[Any]]] | None = None
    ) -> None:
        """Read the answers of each device. `changes` replaces answers by device and function."""
        self._devices: dict[str, dict[str, list[Any]]] = json.loads(recording.read_text())["devices"]
        for device, answers in (changes or {}).items():
            self._devices[device].update(answers)
        self._asked: dict[tuple[str, str], int] = {}
        self._events: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.is_there, self.open_sessions = True, 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)  # AttributeError for names that the real module does not have
        if not name.startswith("nvmlDevice"):
            return real

        def answer(handle: str, *args: Any) -> Any:
            self.calls.append(name)
            given = "/".join([name, *(str(item) for item in args)])
            return self._answer(handle, given if given in self._devices[handle] else name)

        return answer

    def nvmlInit(self) -> None:
        if not self.is_there:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        self.open_sessions += 1

    def nvmlShutdown(self) -> None:
        self.open_sessions -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self._devices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceRegisterEvents(self, handle: str, event_types: int, event_set: Any) -> None:
        if event_types & pynvml.nvmlEventTypeXidCriticalError == 0 or "xids" not in self._devices[handle]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        event_set += self._devices[handle]["xids"]

    def nvmlEventSetCreate(self) -> list[dict[str, Any]]:
        return self._events

    def nvmlEventSetWait_v2(self, event_set: list[dict[str, Any]], timeout_ms: int) -> Any:
        assert timeout_ms == 0, "the thread must not be held up"
        if not event_set or event_set[0]["after"] > self.calls.count("nvmlDeviceGetUtilizationRates"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=event_set.pop(0)["xid"])

    def nvmlEventSetFree(self, event_set: list[dict[str, Any]]) -> None:
        event_set.clear()

    def _answer(self, handle: str, name: str) -> Any:
        answers = self._devices[handle].get(name, ["NVML_ERROR_NOT_SUPPORTED"])
        position = self._asked.get((handle, name), 0)
        self._asked[handle, name] = position + 1
        found = answers[min(position, len(answers) - 1)]
        if isinstance(found, Exception):
            raise found
        if isinstance(found, str):
            raise pynvml.NVMLError(getattr(pynvml, found))
        return _as_struct(found)


def _as_struct(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{key: _as_struct(item) for key, item in value.items()})
    return [_as_struct(item) for item in value] if isinstance(value, list) else value
