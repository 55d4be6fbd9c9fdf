"""The fixtures of the engine tests."""

from __future__ import annotations

from engine.conftest import model_folder, start

__all__ = ["model_folder", "start"]
