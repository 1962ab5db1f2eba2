"""Makes the pictures of docs/view.md: `python docs/view_screenshots.py SUCCESS GAMED STALE [--output DIR]`.

The runs are those of the page's three questions. Needs chromium.
"""

import argparse
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.browser import Browser
from treadle.view.find import Indexes, find
from treadle.view.run_pages import RunPages
from treadle.view.server import ViewerServer

DOCS = Path(__file__).parent
SIZE = (1280, 800)


def success_screens(pages: RunPages) -> Iterator[tuple[str, str, bool]]:
    """Name, address and whether dark: what the page shows of the run that stood at 0.95."""
    first, last = pages.overview()["steps"]
    step = (first + last) // 3
    groups = pages.groups(step=step)["groups"]
    told = max(groups, key=lambda group: (group["spread"] or 0.0, len(group["uid"])))
    scored = sorted(told["samples"], key=lambda item: item["reward"] or 0.0)
    low, high = scored[0]["id"], scored[-1]["id"]
    yield "run", "/run/success", False
    yield "group", f"/run/success/group?{urlencode({'uid': told['uid'], 'step': step})}", False
    yield "transcript", f"/run/success/t/{high}/transcript", True
    yield "diff", f"/run/success/diff?id={low}&other={high}", False
    yield "find", "/run/success/find?q=%22%23%23%23%23%22&validation=yes&max_reward=0", False


def stale_screens(pages: RunPages) -> Iterator[tuple[str, str, bool]]:
    """The token with the largest gap of the run that is stale, in the text and in the table."""
    indexes = Indexes.of(pages)
    while (found := find(pages, indexes, {"order": "gap"}))["indexed"] < 1:
        pass
    indexes.texts.close()
    item = found["samples"][0]
    position = item["gap"]["position"]
    given = {"by": "gap", "mark": f"{position}-{position + 1}", "tok": position}
    yield "tokens", f"/run/stale/t/{item['id']}/tokens?{urlencode(given)}", True
    yield "table", f"/run/stale/t/{item['id']}/tokens?{urlencode({**given, 'as': 'table'})}", False


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("success", "gamed", "stale")
    for name in names:
        parser.add_argument(name, type=Path)
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR")
    given = parser.parse_args(words)
    runs = {name: getattr(given, name) for name in names}
    server = ViewerServer(runs)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    screens = [
        *success_screens(RunPages("success", runs["success"])),
        *stale_screens(RunPages("stale", runs["stale"])),
        ("findings", "/run/gamed/findings", False),
    ]
    try:
        with Browser(*SIZE) as browser:
            browser.open(server.url)
            for name, address, dark in screens:
                browser.dark(dark)
                browser.go(address)
                browser.wait("!/reading on|Reading/.test(document.getElementById('main').innerText)")
                browser.wait("!document.querySelector('[aria-busy]')")
                browser.wait("[...document.images].every(image => image.complete)")
                browser.screenshot(given.output / f"view-{name}.png")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    main()
