"""A picture of the dashboard, taken by a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvrecall.errors import ConfigError, EngineError

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update"
).split()
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE_MS = 60_000


def require_browser() -> None:
    """Raises ConfigError if no picture can be taken here."""
    try:
        import playwright.sync_api  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("SHOT=1 needs playwright: pip install 'kvrecall[dev]'") from error
    if _browser() is None:
        raise ConfigError(f"SHOT=1 needs a browser: one of {', '.join(_BROWSERS)}")


def _browser() -> str | None:
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)


def take(url: str, path: Path, width: int = 1360, height: int = 900) -> None:
    """Writes what the dashboard at ``url`` shows to ``path``, a PNG. Raises EngineError."""
    from playwright.sync_api import Error, sync_playwright

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=_browser(), args=_FLAGS)
            page = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme="light"
            )
            page.goto(url)
            page.wait_for_selector("#recall svg", timeout=_PATIENCE_MS)
            page.wait_for_selector("#tree .row", timeout=_PATIENCE_MS)
            page.screenshot(path=path, full_page=True)
            browser.close()
    except Error as error:
        raise EngineError(f"no picture of {url}: {error.message.splitlines()[0]}") from error
